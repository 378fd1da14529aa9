"""Every rule of the audit: what it refuses and says, and what only looks like it."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.context import Context
from lightning_cp.diagnostics.audit import mode, rules
from lightning_cp.diagnostics.audit.call import Call
from lightning_cp.diagnostics.audit.tokens import Tokens
from lightning_cp.errors import RefusedError
from lightning_cp.layout import contiguous
from lightning_cp.sequences import Sequence
from tests._harness.audited import audited

B, S, C, H, D = 2, 12, 16, 4, 5

X = torch.randn(B, S, C)
XT = X.transpose(1, 2)
SBC = X.transpose(0, 1)
HEADS = torch.randn(B, H, S, D)
IDS = torch.arange(B * S).view(B, S)
VALID = IDS > 5
SCORES = torch.randn(B, H, S, S)
TABLE = torch.randn(64, D)
SQUARE = torch.ones(64, 64, dtype=torch.bool).tril()
WEIGHT = nn.Parameter(torch.randn(64, D))


def seeded(make: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng():
        return make()


CONV = seeded(lambda: nn.Conv1d(C, C, 3, padding=1))
UNPADDED = seeded(lambda: nn.Conv1d(C, C, 3))
WIDE = seeded(lambda: nn.Conv1d(C, C, 3, dilation=2, groups=C))
ALIKE = seeded(lambda: nn.Conv1d(C, C, 5, padding="same"))
BACK = seeded(lambda: nn.ConvTranspose1d(C, C, 3, padding=1))
POINT = seeded(lambda: nn.Conv1d(C, C, 1))
IMAGE = seeded(lambda: nn.Conv2d(1, 1, 3, padding=1))
LSTM, GRU, RNN = (
    seeded(lambda kind=kind: kind(C, C, batch_first=True)) for kind in (nn.LSTM, nn.GRU, nn.RNN)
)
BATCH = seeded(lambda: nn.BatchNorm1d(C))
EVAL = seeded(lambda: nn.BatchNorm1d(C).eval())


def differentiable() -> Tensor:
    """Scores that a model has made."""
    return SCORES * nn.Parameter(torch.ones(1))


class Refused(NamedTuple):
    """A call, and patterns of what is said of it and of the way out."""

    call: Callable[[], object]
    what: str
    way_out: str
    kept: Tensor | None = None


def over(name: str, instead: str) -> tuple[str, str]:
    return rf"torch\.{name} over this rank's 12 tokens", f"functional.{instead}"


GATHER = "functional.gather_sequence"
FIRST = "the first of this rank's 12 tokens is taken out", GATHER
LAST = "the last of this rank's 12 tokens is taken out", GATHER
SHIFT = "a shift along the sequence", "functional.shift_labels"
ATTENTION = "scores of 12 x 1[23] tokens.*softmax", "scaled_dot_product_attention"
CONVOLVED = r"a convolution with kernel size \d over this rank's 12 tokens", GATHER
RECURRENT = "a recurren.* 12 tokens", GATHER
TABLES = "the first 12 of 64 entries of a table", "functional.positions(12)"

REFUSED = {
    "x[:, 0]": Refused(lambda: X[:, 0], *FIRST),
    "x[:, -1]": Refused(lambda: X[:, -1], *LAST),
    "x[:, S - 1]": Refused(lambda: X[:, S - 1], *LAST),
    "x[0] of [S, B, C]": Refused(lambda: SBC[0], *FIRST),
    "x[-1] of [S, B, C]": Refused(lambda: SBC[-1], *LAST),
    "x[:, :, 0] of heads": Refused(lambda: HEADS[:, :, 0], *FIRST),
    "x[..., -1] of [B, C, S]": Refused(lambda: XT[..., -1], *LAST),
    "x[:, :1]": Refused(lambda: X[:, :1], *FIRST),
    "x[:, -1:]": Refused(lambda: X[:, -1:], *LAST),
    "narrow": Refused(lambda: X.narrow(1, 0, 1), *FIRST),
    "split off the first": Refused(lambda: X.split([1, S - 1], 1), *FIRST),
    "split off the last": Refused(lambda: X.split([S - 1, 1], 1), *LAST),
    "x[:, 1:]": Refused(lambda: IDS[:, 1:], *SHIFT),
    "x[:, :-1]": Refused(lambda: X[:, :-1], *SHIFT),
    "x[..., 1:, :]": Refused(lambda: X[..., 1:, :], *SHIFT),
    "diff": Refused(lambda: X.diff(dim=1), *SHIFT),
    "roll": Refused(lambda: X.roll(1, 1), r"torch\.roll of this rank's.*shift", SHIFT[1]),
    "flip": Refused(lambda: X.flip(1), r"torch\.flip of this rank's.*shift", SHIFT[1]),
    "shift by padding": Refused(lambda: F.pad(X, (0, 0, 1, -1)), "padding by 1 and -1", SHIFT[1]),
    "labels padded": Refused(lambda: F.pad(IDS, (0, 1), value=-100), *SHIFT),
    "table": Refused(lambda: TABLE[:S], *TABLES, kept=TABLE),
    "table in a view": Refused(lambda: TABLE[None, :, None][:, :S], *TABLES, kept=TABLE),
    "parameter": Refused(lambda: WEIGHT[:S], *TABLES, kept=WEIGHT),
    "mask of the model": Refused(lambda: SQUARE[:S, :S], *TABLES, kept=SQUARE),
    "mean": Refused(lambda: X.mean(1), *over("mean", "sequence_mean")),
    "mean over more": Refused(lambda: X.mean((1, 2)), *over("mean", "sequence_mean")),
    "mean of heads": Refused(lambda: HEADS.mean(-2), *over("mean", "sequence_mean")),
    "mean of [B, C, S]": Refused(lambda: XT.mean(-1), *over("mean", "sequence_mean")),
    "mean of [S, B, C]": Refused(lambda: SBC.mean(0), *over("mean", "sequence_mean")),
    "mean kept": Refused(lambda: X.mean(1, keepdim=True), *over("mean", "sequence_mean")),
    "einsum": Refused(lambda: torch.einsum("bsc->bc", X), *over("sum", "sequence_sum")),
    "sum": Refused(lambda: VALID.sum(1), *over("sum", "sequence_sum")),
    "sum by list": Refused(lambda: X.sum(dim=[-2]), *over("sum", "sequence_sum")),
    "amax": Refused(lambda: X.amax(1), *over("amax", "sequence_max")),
    "max": Refused(lambda: X.max(1), *over("max", "sequence_max")),
    "softmax": Refused(lambda: X.softmax(1), *over("softmax", "global_softmax")),
    "softmax of a row": Refused(lambda: X[..., 1].softmax(-1), *over("softmax", "global_softmax")),
    "log_softmax": Refused(lambda: X.log_softmax(1), *over("log_softmax", "gather_sequence")),
    "amin": Refused(lambda: X.amin(1), *over("amin", "gather_sequence")),
    "min": Refused(lambda: X.min(1), *over("min", "gather_sequence")),
    "argmax": Refused(lambda: X.argmax(1), *over("argmax", "gather_sequence")),
    "argmin": Refused(lambda: X.argmin(1), *over("argmin", "gather_sequence")),
    "aminmax": Refused(lambda: X.aminmax(dim=1), *over("aminmax", "gather_sequence")),
    "any": Refused(lambda: VALID.any(1), *over("any", "gather_sequence")),
    "any by list": Refused(lambda: (X > 0).any([1, 2]), *over("any", "gather_sequence")),
    "all": Refused(lambda: VALID.all(-1), *over("all", "gather_sequence")),
    "nansum": Refused(lambda: X.nansum(1), *over("nansum", "gather_sequence")),
    "prod": Refused(lambda: X.prod(1), *over("prod", "gather_sequence")),
    "var": Refused(lambda: X.var(1), *over("var", "gather_sequence")),
    "std": Refused(lambda: X.std(1), *over("std", "gather_sequence")),
    "var_mean": Refused(lambda: torch.var_mean(X, 1), *over("var_mean", "gather_sequence")),
    "std_mean": Refused(lambda: torch.std_mean(X, 1), *over("std_mean", "gather_sequence")),
    "norm": Refused(lambda: X.norm(dim=1), *over("linalg_vector_norm", "gather_sequence")),
    "normalize": Refused(lambda: F.normalize(X, dim=1), "linalg_vector_norm over", GATHER),
    "old norm": Refused(lambda: torch.ops.aten.norm(X, 2, [1]), *over("norm", "gather_sequence")),
    "logsumexp": Refused(lambda: X.logsumexp(1), *over("logsumexp", "gather_sequence")),
    "median": Refused(lambda: X.median(1), *over("median", "gather_sequence")),
    "nanmedian": Refused(lambda: X.nanmedian(1), *over("nanmedian", "gather_sequence")),
    "mode": Refused(lambda: IDS.mode(1), *over("mode", "gather_sequence")),
    "kthvalue": Refused(lambda: X.kthvalue(2, 1), *over("kthvalue", "gather_sequence")),
    "topk": Refused(lambda: X.topk(2, 1), *over("topk", "gather_sequence")),
    "sort": Refused(lambda: X.sort(1), *over("sort", "gather_sequence")),
    "stable sort": Refused(lambda: X.sort(dim=1, stable=True), *over("sort", "gather_sequence")),
    "argsort": Refused(lambda: X.argsort(1), *over("sort", "gather_sequence")),
    "count": Refused(lambda: IDS.count_nonzero(1), *over("count_nonzero", "gather_sequence")),
    "scores": Refused(lambda: SCORES.softmax(-1), *ATTENTION),
    "scores of 3 dims": Refused(lambda: SCORES.flatten(0, 1).softmax(-1), *ATTENTION),
    "scores in float32": Refused(lambda: F.softmax(SCORES, -1, torch.float32), *ATTENTION),
    "scores and a sink": Refused(lambda: F.pad(SCORES, (0, 1)).softmax(-1), *ATTENTION),
    "safe softmax": Refused(lambda: torch._safe_softmax(SCORES, -1), *ATTENTION),
    "matmul": Refused(lambda: HEADS @ HEADS.mT, *ATTENTION),
    "scores by einsum": Refused(lambda: torch.einsum("bhqd,bhkd->bhqk", HEADS, HEADS), *ATTENTION),
    "baddbmm": Refused(lambda: torch.baddbmm(torch.zeros(1), X, XT), *ATTENTION),
    "decay": Refused(lambda: differentiable().tril(), *ATTENTION),
    "decay in place": Refused(lambda: differentiable().tril_(), *ATTENTION),
    "decay of later": Refused(lambda: differentiable().triu(1), *ATTENTION),
    "decay of later in place": Refused(lambda: differentiable().triu_(), *ATTENTION),
    "linear attention": Refused(lambda: HEADS.mT @ HEADS, "adds over this rank's 12", "attention"),
    "attention pooling": Refused(
        lambda: torch.einsum("bs,bsc->bc", X[..., 1], X), "adds over this rank's 12", "sequence_sum"
    ),
    "conv": Refused(lambda: CONV(XT), *CONVOLVED),
    "conv after padding": Refused(lambda: UNPADDED(F.pad(XT, (2, 0))), *CONVOLVED),
    "conv without padding": Refused(lambda: UNPADDED(XT), *CONVOLVED),
    "dilated": Refused(lambda: WIDE(F.pad(XT, (4, 0))), *CONVOLVED),
    "same": Refused(lambda: ALIKE(XT), *CONVOLVED),
    "transposed": Refused(lambda: BACK(XT), *CONVOLVED),
    "conv of heads": Refused(lambda: F.conv1d(XT.repeat(3, 1, 1), CONV.weight), *CONVOLVED),
    "unfold": Refused(lambda: X.unfold(1, 4, 2), "windows of 4 over this rank's 12", GATHER),
    "fft": Refused(lambda: torch.fft.fft(X, dim=1), "a Fourier transform over", GATHER),
    "fft of complex": Refused(lambda: torch.fft.fft(X + 0j, dim=1), "a Fourier transform", GATHER),
    "rfft": Refused(lambda: torch.fft.rfft(X, dim=1), "a Fourier transform over", GATHER),
    "lstm": Refused(lambda: LSTM(X), *RECURRENT),
    "lstm in double": Refused(lambda: nn.LSTM(C, C).double()(SBC.double()), *RECURRENT),
    "gru": Refused(lambda: GRU(X), *RECURRENT),
    "rnn": Refused(lambda: RNN(X), *RECURRENT),
    "loop": Refused(lambda: list(SBC), *RECURRENT),
    "unbind": Refused(lambda: X.unbind(1), *RECURRENT),
    "batch norm": Refused(lambda: BATCH(XT), "batch statistics over this rank's 12", "SyncBatch"),
    "flat batch norm": Refused(lambda: BATCH(X.flatten(0, 1)), "batch statistics", "LayerNorm"),
    "instance norm": Refused(lambda: F.instance_norm(XT), "batch statistics", "LayerNorm"),
    "group norm": Refused(lambda: F.group_norm(XT, 2), "group statistics over", "LayerNorm"),
    "layer norm": Refused(lambda: F.layer_norm(X, (S, C)), "layer statistics over", "RMSNorm"),
    "avg_pool": Refused(lambda: F.avg_pool1d(XT, 2), *over("avg_pool2d", "gather_sequence")),
    "max_pool": Refused(lambda: F.max_pool1d(XT, 2), *over("max_pool2d.*", "gather_sequence")),
    "adaptive max": Refused(lambda: F.adaptive_max_pool1d(XT, 1), "adaptive_max_pool2d", GATHER),
    "adaptive avg": Refused(lambda: F.adaptive_avg_pool1d(XT, 3), "adaptive_avg_pool2d", GATHER),
    "global avg": Refused(lambda: F.adaptive_avg_pool1d(XT, 1), *over("mean", "sequence_mean")),
}

PASSED: dict[str, Callable[[], object]] = {
    "another token": lambda: X[:, 3],
    "x[0]": lambda: X[0],
    "x[..., 0]": lambda: X[..., 0],
    "a row's own number in its tokens": lambda: (IDS[:, 0], IDS[:, -1:], IDS.split([1, S - 1], 1)),
    "heads[:, 0]": lambda: HEADS[:, 0],
    "stacked[0]": lambda: torch.stack([HEADS, HEADS])[0],
    "square[:, 0]": lambda: SCORES[:, :, 0],
    "first of something else": lambda: torch.ones(B, S + 1, C)[:, 0],
    "chunks": lambda: [X[:, start : start + 5] for start in range(0, S, 5)],
    "a short last chunk": lambda: X[:, 11:22],
    "every second": lambda: X[:, ::2],
    "all": lambda: X[:, 0:],
    "features": lambda: (X[..., 1:], X[..., :-1], X[..., :1], X.roll(1, -1), X.flip(-1)),
    "halves": lambda: (X.chunk(2, 1), X.split(6, 1), X.split([4, 8], 1), X.chunk(2, -1)),
    "roll of all": lambda: torch.ones(3, 5).roll(1),
    "padding features": lambda: F.pad(X, (1, 0)),
    "padding tokens": lambda: F.pad(X, (0, 0, 0, 4)),
    "another part of a table": lambda: (TABLE[: S + 1], TABLE[1 : S + 1], TABLE[S:]),
    "rows of what no module keeps": lambda: torch.ones(64, D)[:S],
    "over features": lambda: (X.mean(-1), X.sum(2), X.amax(-1), X.var(-1), X.softmax(-1)),
    "over rows": lambda: (X.mean(0), VALID.any(0), X.logsumexp(0)),
    "over heads": lambda: (HEADS.mean(1), HEADS.softmax(1), SCORES.mean(1)),
    "to a scalar": lambda: (X.mean(), X.norm(), X.sum((0, 1, 2)), VALID.any(), X.max(), X.std()),
    "to a scalar by list": lambda: (X.amax(), X.sum(()), X.amax((0, 1, 2)), IDS.sum((0, 1))),
    "one dim": lambda: (torch.ones(S).sum(0), torch.ones(S).softmax(0), torch.ones(S)[0]),
    "flat tokens": lambda: (X.flatten(0, 1).sum(0), X.flatten(0, 1)[0]),
    "experts": lambda: X.flatten(0, 1).softmax(-1).topk(2),
    "of another row count": lambda: torch.ones(B + 1, S, C).mean(1),
    "elementwise": lambda: torch.max(X, X),
    "masks": lambda: (
        torch.ones(S, S).tril(),
        torch.ones(1, 1, S, S, dtype=torch.bool).triu(1),
        nn.Transformer.generate_square_subsequent_mask(S),
    ),
    "scores of something else": lambda: torch.ones(B, H, 5, 5).softmax(-1),
    "per token": lambda: X.unflatten(-1, (H, 4)).flatten(0, 1) @ torch.ones(B * S, 4, H),
    "linear": lambda: (F.linear(X, torch.ones(7, C)), X @ torch.ones(C, 7), X.mT.mT @ torch.eye(C)),
    "heads of a token": lambda: torch.ones(B * S, H, S) @ torch.ones(B * S, S, H),
    "channels first": lambda: torch.ones(7, C) @ XT,
    "pointwise": lambda: POINT(XT),
    "conv of something else": lambda: (UNPADDED(torch.ones(B, C, S + 3)), CONV(XT[..., 2:7])),
    "image": lambda: IMAGE(torch.ones(B, 1, S, S)),
    "windows of features": lambda: X.unfold(-1, 4, 2),
    "fft of features": lambda: torch.fft.rfft(X, dim=-1),
    "rnn over characters": lambda: GRU(torch.ones(B * S, 5, C)),
    "unbind features": lambda: (X.unflatten(-1, (2, 8)).unbind(2), list(X)),
    "batch norm in eval": lambda: EVAL(XT),
    "batch norm of rows": lambda: BATCH(torch.arange(32.0).view(B, C)),
    "image norm": lambda: F.group_norm(torch.ones(B, C, 3, 4), 2),
    "norms": lambda: (F.layer_norm(X, (C,)), F.rms_norm(X, (C,)), F.normalize(X, dim=-1)),
    "norms over heads": lambda: F.layer_norm(HEADS.transpose(1, 2), (H, D)),
    "pool of features": lambda: (F.avg_pool1d(X, 2), F.max_pool2d(torch.ones(B, 1, S, S), 2)),
    "pool of one": lambda: F.max_pool1d(XT, 1),
    "loss": lambda: F.cross_entropy(X.mT, IDS % C, reduction="none"),
    "gather": lambda: X.gather(1, IDS[..., None] % S),
}


def assert_same(found: object, expected: object) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    elif isinstance(expected, tuple | list):
        assert isinstance(found, tuple | list)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_refused(case: Refused) -> None:
    with pytest.raises(RefusedError) as caught:
        audited(case.call, share=S, rows=B, widths=(C, 3), kept=case.kept)
    message = str(caught.value)
    where, what, way_out = re.split(r"\): |; ", message, maxsplit=2)
    assert where.startswith("module 'embed.positions' (Calling, ")
    assert re.search(case.what, what), message
    assert case.way_out in way_out, message
    assert message.endswith("functional.local() if it is meant for this rank's tokens alone")


@pytest.mark.parametrize("call", PASSED.values(), ids=list(PASSED))
def test_passed(call: Callable[[], object]) -> None:
    found = audited(call, share=S, rows=B, widths=(C, 3), kept=TABLE)
    assert_same(found, call())


COINCIDENT = {
    "[B, S, C]": ("x[:, 0]", "x[:, -1]", "x[:, 1:]", "x[:, :-1]", "mean"),
    "labels": ("sum", "any", "labels padded"),
    "scores": ("baddbmm with gradient",),
    "layers": ("conv", "batch norm", "flat batch norm"),
    "tables": ("table", "mask of the model"),
}
UNCLEAR = (
    *("x[0] of [S, B, C]", "mean of [B, C, S]", "mean of heads", "parameter"),
    *("scores", "linear attention", "decay", "unbind", "loop"),
)


@pytest.mark.parametrize("name", [name for names in COINCIDENT.values() for name in names])
def test_what_is_clear_even_if_a_parameter_has_the_size_of_the_share(name: str) -> None:
    if name == "baddbmm with gradient":
        weight = nn.Parameter(torch.ones(1))
        case = Refused(lambda: torch.baddbmm(torch.zeros(1), X * weight, XT), *ATTENTION)
    else:
        case = REFUSED[name]
    with pytest.raises(RefusedError, match=case.what):
        audited(case.call, share=S, rows=B, widths=(S, C), kept=case.kept)


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_may_be_features_of_that_size_passes(name: str) -> None:
    case = REFUSED[name]
    audited(case.call, share=S, rows=B, widths=(S, C), kept=case.kept)


WIDTH_IS_SHARE: dict[str, Callable[[], object]] = {
    "norm": lambda: torch.ones(B, S, S).mean(-1),
    "flat norm": lambda: torch.ones(B * S, S).var(-1),
    "router": lambda: (torch.ones(B, S, S).softmax(-1), torch.ones(B * S, S).topk(2, -1)),
    "logits": lambda: (torch.ones(B, S).softmax(-1), torch.ones(B, S).sum(1)),
    "one logit": lambda: (torch.ones(B, S)[:, 0], torch.ones(B, S)[:, 1:]),
    "head norm": lambda: torch.ones(B, H * S, S).pow(2).mean(-1, keepdim=True),
    "fused weight": lambda: WEIGHT[:S],
    "modulation": lambda: torch.ones(B, S, C).unbind(1),
    "low rank": lambda: torch.ones(B, C, S) @ torch.ones(B, S, 3),
    "channel attention": lambda: F.conv1d(torch.ones(B, 1, S), torch.ones(1, 1, 3), padding=1),
    "sampling": lambda: torch.ones(3, S).cumsum(-1),
}


@pytest.mark.parametrize("call", WIDTH_IS_SHARE.values(), ids=list(WIDTH_IS_SHARE))
def test_features_of_the_size_of_the_share_pass(call: Callable[[], object]) -> None:
    found = audited(call, share=S, rows=B, widths=(S, C), kept=WEIGHT)
    assert_same(found, call())


class Elsewhere(NamedTuple):
    """A call of an operator that this machine cannot run, and whether it is refused."""

    name: str
    args: tuple[object, ...]
    refused: bool


def rnn(x: Tensor, batch_first: bool) -> tuple[object, ...]:
    """Arguments of cuDNN's recurrent operator."""
    return (x, [], 0, None, x[:1], None, 2, C, 0, 1, batch_first, 0.0, True, False, [], None)


STATE = (torch.ones(C),) * 4
ELSEWHERE = (
    Elsewhere("_cudnn_rnn", rnn(X, True), True),
    Elsewhere("_cudnn_rnn", rnn(SBC, False), True),
    Elsewhere("_cudnn_rnn", rnn(SBC, True), False),
    Elsewhere("_cudnn_rnn", rnn(torch.ones(5, B * S, C), False), False),
    Elsewhere(
        "miopen_rnn", (X, [], 0, X[:1], None, 2, C, 1, True, 0.0, True, False, [], None), True
    ),
    Elsewhere("cudnn_batch_norm", (XT, *STATE, True, 0.1, 1e-5), True),
    Elsewhere("cudnn_batch_norm", (XT, *STATE, False, 0.1, 1e-5), False),
    Elsewhere("miopen_batch_norm", (XT, *STATE, True, 0.1, 1e-5), True),
    Elsewhere("_native_batch_norm_legit", (XT, *STATE, True, 0.1, 1e-5), True),
    Elsewhere("_native_batch_norm_legit", (XT, *STATE, False, 0.1, 1e-5), False),
)


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: f"{case.name}-{case.refused}")
def test_operators_of_other_devices(case: Elsewhere) -> None:
    packet = getattr(torch.ops.aten, case.name)
    sequence = Sequence(layout=contiguous(2 * S, 2), length=2 * S, batch=B)
    context = Context(
        rank=0, world=2, group=None, meta=None, sequences={"s": sequence}, exchange="ring"
    )
    found = rules.RULES[packet](Call(packet.default, case.args, {}, Tokens(context)))
    assert (found is not None) == case.refused
    if found is not None:
        assert "this rank's 12 tokens" in found.what


def test_every_operator_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one of the table is refused by a call above, but for those that number tokens."""
    seen = {case.name for case in ELSEWHERE if case.refused}

    class Recording(dict[Any, Any]):
        def __getitem__(self, packet: Any) -> Any:
            seen.add(packet.__name__)
            return super().__getitem__(packet)

    monkeypatch.setattr(mode, "RULES", Recording(rules.RULES))
    for case in REFUSED.values():
        with pytest.raises(RefusedError):
            audited(case.call, share=S, rows=B, widths=(C, 3), kept=case.kept)
    numbering = {"arange", "linspace", *rules.NAMES[rules.numbering.running].split()}
    assert {packet.__name__ for packet in rules.RULES} - seen == numbering
