"""Overrides at the dispatcher: what they see, what they refuse, and that they leave no trace."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._guards
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_cp import compat, functional
from lightning_cp.context import SLOT, Context, reenter
from lightning_cp.errors import ConfigError, RefusedError
from lightning_cp.layout import Layout, contiguous
from lightning_cp.sequences import Sequence
from lightning_cp.swap import Installation, _torch
from lightning_cp.swap.install import CACHE_TAG

SIZE, BATCH, HEADS, WIDTH = 5, 2, 2, 4
PLACES = [(name, key) for name in _torch.OPERATORS for key in _torch.keys("cpu")]


def overrides() -> list[tuple[str, str]]:
    return [place for place in PLACES if _torch.has_override(*place)]


def context(
    *,
    keys: Any = None,
    module: nn.Module | None = None,
    layout: Layout | None = None,
    length: int = SIZE,
    rank: int = 0,
) -> Context:
    """One rank holds the sequence, unless a layout says otherwise."""
    layout = layout or contiguous(length, 1)
    return Context(
        rank=rank,
        world=layout.world,
        group=None,
        meta=None,
        sequences={"s": Sequence(layout=layout, length=length, batch=BATCH, keys=keys)},
        exchange="ring",
        module=None if module is None else weakref.ref(module),
    )


@pytest.fixture
def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, SIZE, WIDTH)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


class Attention(nn.Module):
    """Attention with whatever arguments it is given, two levels below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_name(q, k, v, **self.options)


def tree(leaf: nn.Module) -> nn.Module:
    root = nn.Module()
    root.blocks = nn.ModuleList([nn.Identity(), nn.ModuleDict({"attn": leaf})])
    return root


def mha(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    return nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True, **options)


def hidden(q: Tensor) -> Tensor:
    """`[B, H, S, D]` as the input `[B, S, H * D]` of a module."""
    return q.transpose(1, 2).flatten(2).contiguous()


def with_mha(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = hidden(q)
    causal = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)
    return mha()(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0]


def with_encoder_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
    return layer.eval()(hidden(q))


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "attribute": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "by-name": by_name,
    "causal": lambda q, k, v: by_name(q, k, v, is_causal=True, scale=0.3),
    "binding": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v),
    "aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "gqa": lambda q, k, v: by_name(q, k[:, :1], v[:, :1], enable_gqa=True),
    "no-batch": lambda q, k, v: by_name(q[0], k[0], v[0]),
    "two-batches": lambda q, k, v: by_name(*(x.unsqueeze(1) for x in (q, k, v))),
    "one-key-row": lambda q, k, v: by_name(q, k[:1], v[:1]),
    "mha": with_mha,
    "mha-eval": lambda q, *_: mha(dropout=0.5).eval()(*[hidden(q)] * 3, need_weights=False)[0],
    "encoder-layer": with_encoder_layer,
    "checkpoint": lambda *qkv: checkpoint(by_name, *qkv, use_reentrant=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode", "autocast"])
def test_every_way_to_call_attention_is_seen(
    mode: str, call: Callable[..., Tensor], qkv: list[Tensor], installation: Installation
) -> None:
    modes = {
        "train": torch.enable_grad(),
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    with modes[mode]:
        plain = call(*qkv)
        active = context()
        with SLOT.activate(active):
            swapped = call(*qkv)
    assert active.log.attention == 1
    assert swapped.dtype == plain.dtype
    assert swapped.shape == plain.shape
    assert swapped.requires_grad == plain.requires_grad
    tolerance = 2e-2 if mode == "autocast" else 1e-5
    assert torch.allclose(swapped, plain, atol=tolerance, rtol=tolerance)
    if mode == "autocast" and call is by_name:
        assert swapped.dtype == torch.bfloat16
    if swapped.requires_grad:
        losses = plain.square().sum(), reenter(swapped.square().sum(), active)
        grads = [torch.autograd.grad(loss, qkv[0])[0] for loss in losses]
        assert grads[1].dtype == torch.float32
        assert torch.allclose(*grads, atol=10 * tolerance, rtol=10 * tolerance)


def test_recomputation_is_seen(qkv: list[Tensor], installation: Installation) -> None:
    active = context()
    with SLOT.activate(active):
        loss = reenter(CALLS["checkpoint"](*qkv).sum(), active)
    loss.backward()
    assert active.log.attention == 2
    assert SLOT.active is None


def test_without_a_context_results_are_bit_identical(
    qkv: list[Tensor], installation: Installation
) -> None:
    during = [call(*qkv) for call in CALLS.values()]
    installation.remove()
    after = [call(*qkv) for call in CALLS.values()]
    for one, other in zip(during, after, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fast", [True, False])
def test_removing_leaves_nothing_behind(fast: bool, qkv: list[Tensor]) -> None:
    enabled, tag = torch.backends.mha.get_fastpath_enabled(), torch.compiler.config.cache_key_tag
    torch.backends.mha.set_fastpath_enabled(fast)
    torch.compiler.config.cache_key_tag = "mine"
    try:
        before = [call(*qkv) for call in CALLS.values()]
        target = torch.tensor([0, 1, -100])
        losses = [F.cross_entropy(qkv[0][0, 0, :3], target), F.nll_loss(qkv[0][0, 0, :3], target)]
        assert not overrides()
        installation = Installation()
        assert overrides() == PLACES
        assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.compiler.config.cache_key_tag == f"mine{CACHE_TAG}"
        with SLOT.activate(context()):
            by_name(*qkv)
        for _ in range(2):  # the second time does nothing
            installation.remove()
            assert not overrides()
            assert torch.backends.mha.get_fastpath_enabled() == fast
            assert torch.compiler.config.cache_key_tag == "mine"
        after = [call(*qkv) for call in CALLS.values()]
        after += [F.cross_entropy(qkv[0][0, 0, :3], target), F.nll_loss(qkv[0][0, 0, :3], target)]
        for one, other in zip([*before, *losses], after, strict=True):
            assert torch.equal(one, other)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        torch.compiler.config.cache_key_tag = tag


def test_two_installations_cannot_be_in_place(installation: Installation) -> None:
    with pytest.raises(ConfigError, match=r"scaled_dot_product_attention at AutogradCPU.*already"):
        Installation()
    assert overrides() == PLACES
    installation.remove()
    Installation().remove()


def test_an_override_of_somebody_else_is_an_error() -> None:
    foreign = torch.library.Library("aten", "IMPL")
    foreign.impl("nll_loss_nd", lambda *args: None, "CPU")
    try:
        with pytest.raises(ConfigError, match="aten::nll_loss_nd at CPU is overridden already"):
            Installation()
        assert overrides() == [("nll_loss_nd", "CPU")]
    finally:
        foreign._destroy()
    assert not overrides()


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['mps'\] are not supported; use cpu or cuda"):
        Installation(("cpu", "mps"))
    assert not overrides()


PAD = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
KEYS = ((0, 4), (1, 3))


PADS = {
    "bool": PAD,
    "-inf": torch.zeros(PAD.shape).masked_fill(~PAD, float("-inf")),
    "min": torch.zeros(PAD.shape).masked_fill(~PAD, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", PADS.values(), ids=list(PADS))
def test_the_padding_of_the_batch_is_accepted_as_a_mask(
    mask: Tensor, qkv: list[Tensor], installation: Installation
) -> None:
    mask = mask[:, None, None, :]
    plain = by_name(*qkv, attn_mask=mask)
    with SLOT.activate(context(keys=KEYS)):
        for given in (mask, mask.expand(-1, HEADS, -1, -1)):
            swapped = by_name(*qkv, attn_mask=given)
            assert torch.allclose(swapped, plain, atol=1e-6)
    with SLOT.activate(context()):  # a batch without padding
        ones = torch.ones(1, SIZE, dtype=torch.bool)
        assert torch.allclose(by_name(*qkv, attn_mask=ones), by_name(*qkv), atol=1e-6)


BIASED = PADS["-inf"][:, None, None, :].clone()
BIASED[0, 0, 0, 0] = -0.5

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dense": (
        {"attn_mask": torch.ones(SIZE, SIZE, dtype=torch.bool).tril()},
        rf"a dense attention mask of shape \({SIZE}, {SIZE}\).*is_causal=True.*'attention_mask'",
    ),
    "column": (
        {"attn_mask": torch.ones(SIZE, 1, dtype=torch.bool)},
        r"a dense attention mask of shape \(5, 1\)",
    ),
    "dropout": ({"dropout_p": 0.1}, "attention dropout of 0.1 in training.*set the attention drop"),
    "other padding": (
        {"attn_mask": ~PAD[:, None, None, :]},
        r"is not the padding of this batch; pass the padding as the batch's 'attention_mask'",
    ),
    "no padding": (
        {"attn_mask": torch.ones(BATCH, 1, 1, SIZE, dtype=torch.bool)},
        "is not the padding of this batch",
    ),
    "bias": ({"attn_mask": BIASED}, "is not the padding of this batch"),
    "rows of another batch": (
        {"attn_mask": PAD.flip(0)[:, None, None, :]},
        "is not the padding of this batch",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refusals_name_the_module_and_the_way_out(
    options: dict[str, Any], message: str, qkv: list[Tensor], installation: Installation
) -> None:
    leaf = Attention()
    root = tree(leaf)
    leaf.options = options
    where = r"^module 'blocks\.1\.attn' \(Attention, test_swap\.py:\d+\): "
    with SLOT.activate(context(keys=KEYS, module=root)):
        with pytest.raises(RefusedError, match=where + ".*" + message):
            leaf(*qkv)
        with functional.local():
            leaf(*qkv)
    leaf(*qkv)


def test_grouped_heads_must_be_asked_for(qkv: list[Tensor], installation: Installation) -> None:
    leaf = Attention()
    root = tree(leaf)
    q, k, v = qkv[0], qkv[1][:, :1], qkv[2][:, :1]
    with SLOT.activate(context(module=root)):
        with pytest.raises(RefusedError, match=r"'blocks\.1\.attn'.*2 query heads and 1 key heads"):
            leaf(q, k, v)
        leaf.options = {"enable_gqa": True}
        leaf(q, k, v)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_dropout_is_refused_in_training_only(
    p: float, qkv: list[Tensor], installation: Installation
) -> None:
    leaf, x = mha(dropout=p), hidden(qkv[0])
    root = tree(leaf)
    with SLOT.activate(context(module=root)):
        leaf.eval()(x, x, x, need_weights=False)
        leaf.train()
        if p:
            with pytest.raises(RefusedError, match=r"'blocks\.1\.attn' \(MultiheadAttention, "):
                leaf(x, x, x, need_weights=False)
        else:
            leaf(x, x, x, need_weights=False)


def test_a_length_that_is_nobodys_share_is_refused(
    qkv: list[Tensor], installation: Installation
) -> None:
    short = [x[:, :, :3] for x in qkv]
    with SLOT.activate(context()):
        with pytest.raises(RefusedError, match=r"3 tokens are no declared.*functional\.local\(\)"):
            by_name(*short)
        with functional.local():
            local = by_name(*short)
    assert torch.equal(local, by_name(*short))


def test_local_is_nested_and_ends_with_an_exception() -> None:
    active = context()

    def fail() -> None:
        with functional.local(), functional.local():
            assert SLOT.current is None
            raise ZeroDivisionError

    with SLOT.activate(active):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert SLOT.current is active
    assert SLOT.current is None


def test_positions_of_a_rank() -> None:
    layout = Layout(8, (((0, 2), (5, 8)), ((2, 5),)))
    assert functional.positions(3).tolist() == [0, 1, 2]
    with SLOT.activate(context(layout=layout, length=7)):
        found = functional.positions(5, device="cpu")
        assert found.dtype == torch.int64
        assert found.tolist() == [0, 1, 5, 6, 0]  # the last token is a dummy
        found.add_(1)
        assert functional.positions(5).tolist() == [0, 1, 5, 6, 0]
        with pytest.raises(RefusedError, match="4 tokens are no declared sequence's share"):
            functional.positions(4)
        with functional.local():
            assert functional.positions(4).tolist() == [0, 1, 2, 3]
    with SLOT.activate(context(layout=layout, length=7, rank=1)):
        assert functional.positions(3).tolist() == [2, 3, 4]
    assert functional.positions(0).tolist() == []


def test_private_names_of_torch() -> None:
    """What `swap/_torch.py` and `compat.py` rely on; a failure here means torch has moved."""
    for name in _torch.OPERATORS:
        overload = getattr(torch.ops.aten, name).default
        assert isinstance(overload._dispatch_cache, dict)
        assert callable(overload.decompose)
        composite = f"aten::{name}", "CompositeImplicitAutograd"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(*composite)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutogradCUDA")
    x = torch.randn(1, 1, 3, 4)
    assert torch.equal(_torch.original("scaled_dot_product_attention")(x, x, x), by_name(x, x, x))
    assert callable(torch.library.Library("aten", "IMPL")._destroy)
    assert torch._guards.detect_fake_mode([x]) is None
    assert not _torch.is_tracing(x)
    assert isinstance(torch.compiler.config.cache_key_tag, str)
    assert callable(torch._dynamo.reset)
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)
    assert callable(dist.distributed_c10d._get_default_store)
    assert compat.default_store() is None
    (keyword,) = compat.forward_sync_buffers(False)
    assert keyword in inspect.signature(DistributedDataParallel.__init__).parameters
