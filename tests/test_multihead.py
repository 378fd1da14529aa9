"""`nn.MultiheadAttention` in a context of one rank: what stands for weights, and refusals."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import functional
from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap import Installation
from lightning_cp.swap.multihead import NoWeights
from tests._harness.multihead import (
    BATCH,
    FLOAT_LATER,
    HEADS,
    KEYS,
    LATER,
    PADDING,
    SIZE,
    WIDTH,
    context,
    mha,
    rows,
)

NAMED = r"^module 'blocks\.1\.attn' \(MultiheadAttention, activation\.py:\d+\): .*"


@pytest.fixture
def x() -> Tensor:
    return rows()


def tree(leaf: nn.Module) -> nn.Module:
    root = nn.Module()
    root.blocks = nn.ModuleList([nn.Identity(), nn.ModuleDict({"attn": leaf})])
    return root


USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda w: w.shape,
    "method": lambda w: w.mean(dim=1),
    "hasattr": lambda w: hasattr(w, "detach"),
    "set": lambda w: setattr(w, "requires_grad", False),
    "arithmetic": lambda w: w + 1,
    "reflected": lambda w: 2 * w,
    "tensor on the left": lambda w: torch.ones(()) * w,
    "matmul": lambda w: w @ torch.ones(SIZE, 1),
    "torch function": torch.sum,
    "argument of a torch function": lambda w: torch.stack([w, w]),
    "linear": lambda w: F.linear(w, torch.ones(2, SIZE)),
    "index": lambda w: w[0],
    "index of a tensor": lambda w: torch.ones(3)[w],
    "assign": lambda w: w.__setitem__(0, 1),
    "bool": bool,
    "equal": lambda w: w == 0,
    "less": lambda w: w < 0.5,
    "negative": lambda w: -w,
    "iteration": list,
    "unpacking": lambda w: [*w],
    "length": len,
    "float": float,
    "numpy": np.asarray,
    "call": lambda w: w(),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_weights_refuse_every_use(
    use: Callable[[Any], Any], x: Tensor, installation: Installation
) -> None:
    attn = mha()
    with SLOT.activate(context()):
        out, weights = attn(x, x, x)
        assert out.shape == x.shape
        with pytest.raises(RefusedError, match=r"weights.*need_weights=False.*functional\.local"):
            use(weights)


def test_weights_may_be_kept_but_not_used(x: Tensor, installation: Installation) -> None:
    with SLOT.activate(context()):
        for options, shape in (
            ({}, "[2, 5, 5]"),
            ({"average_attn_weights": False}, "[2, 2, 5, 5]"),
        ):
            _, weights = mha()(x, x, x, **options)
            assert isinstance(weights, NoWeights)
            assert weights is not None
            assert shape in repr(weights)
            assert len({weights}) == 1
            with pytest.raises(RefusedError, match="shape " + shape.replace("[", r"\[")):
                weights.sum()
        assert mha()(x, x, x, need_weights=False)[1] is None
        assert "[5, 5]" in repr(mha()(x[0], x[0], x[0])[1])
        with functional.local():
            local = mha()(x, x, x)
    plain = mha()(x, x, x)
    for one, other in zip(local, plain, strict=True):
        assert torch.equal(one, other)


def test_nothing_changes_without_a_context(x: Tensor) -> None:
    calls = [
        lambda attn: attn(x, x, x),
        lambda attn: attn(x, x, x, PADDING, need_weights=True, attn_mask=LATER),
        lambda attn: attn(x, x, x, attn_mask=FLOAT_LATER, is_causal=True, need_weights=False),
    ]
    attns = [mha(), mha(add_bias_kv=True), mha(add_zero_attn=True), mha(dropout=0.5)]

    def results() -> list[Any]:
        torch.manual_seed(2)
        return [call(attn) for call in calls for attn in copy.deepcopy(attns)]

    before = results()
    installation = Installation()
    during = results()
    installation.remove()
    for expected, found in zip(before, during, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert one is other is None or torch.equal(one, other)


MASKS = {
    "bool": PADDING,
    "-inf": torch.zeros(PADDING.shape).masked_fill(PADDING, float("-inf")),
    "min": torch.zeros(PADDING.shape).masked_fill(PADDING, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["SBE", "BSE"])
def test_padding(
    mask: Tensor, causal: bool, batch_first: bool, x: Tensor, installation: Installation
) -> None:
    attn = mha(batch_first=batch_first)
    y = x if batch_first else x.transpose(0, 1)
    later = LATER if mask.dtype == torch.bool else FLOAT_LATER
    options: dict[str, Any] = {"attn_mask": later, "is_causal": True} if causal else {}
    plain, _ = attn(y, y, y, mask, **options)
    with SLOT.activate(context(keys=KEYS)):
        for need in (True, False):
            swapped, _ = attn(y, y, y, mask, need, **options)
            torch.testing.assert_close(swapped, plain)
    with SLOT.activate(context()), pytest.raises(RefusedError, match="not the padding of this"):
        attn(y, y, y, mask, **options)


@pytest.mark.parametrize("hidden", [False, True])
def test_dummy_tokens_may_be_hidden_or_not(hidden: bool, installation: Installation) -> None:
    y = torch.randn(BATCH, SIZE + 2, WIDTH)
    mask = torch.zeros(BATCH, SIZE + 2, dtype=torch.bool)
    mask[:, SIZE:] = hidden
    with SLOT.activate(context(size=SIZE + 2)):
        found = mha()(y, y, y, mask)[0][:, :SIZE]
    torch.testing.assert_close(found, mha()(*[y[:, :SIZE]] * 3)[0])


def test_one_row_at_a_time(x: Tensor, installation: Installation) -> None:
    """Rows without a batch dimension are right where rows are padded alike, else refused."""
    row, attn = x[1], mha()
    with SLOT.activate(context()):
        torch.testing.assert_close(attn(row, row, row)[0], attn(x, x, x)[0][1])
    with SLOT.activate(context(keys=((0, 3), (0, 3)))):
        expected = attn(x, x, x)[0][1]
        torch.testing.assert_close(attn(row, row, row, PADDING[1])[0], expected)
    with SLOT.activate(context(keys=KEYS)):
        for options in ({}, {"key_padding_mask": PADDING[1]}):
            with pytest.raises(RefusedError):
                attn(row, row, row, **options)


def test_positional_arguments_of_the_function(x: Tensor, installation: Installation) -> None:
    attn, y = mha(), x.transpose(0, 1)
    weight, bias = attn.in_proj_weight, attn.in_proj_bias
    out = attn.out_proj.weight, attn.out_proj.bias
    args = (y, y, y, WIDTH, HEADS, weight, bias, None, None, False, 0.0, *out, True, PADDING)
    plain = F.multi_head_attention_forward(*args)[0]
    with SLOT.activate(context(keys=KEYS)):
        found, weights = F.multi_head_attention_forward(*args)
        torch.testing.assert_close(found, plain)
        assert isinstance(weights, NoWeights)
        assert F.multi_head_attention_forward(*args, False)[1] is None
        with pytest.raises(RefusedError, match="static_k"):
            F.multi_head_attention_forward(*args, static_k=y)


ALMOST = LATER.clone()
ALMOST[3, 1] = True
BIASED = FLOAT_LATER.clone()
BIASED[3, 1] = -0.5
DENSE = rf"a dense attention mask of shape \({SIZE}, {SIZE}\).*pass is_causal=True beside it"
WRONG = rf"is_causal=True, but attn_mask of shape .*generate_square_subsequent_mask\({SIZE}\)"

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "triangle": ({}, {"attn_mask": LATER}, DENSE),
    "dense": ({}, {"attn_mask": ALMOST}, DENSE),
    "hint and another mask": ({}, {"attn_mask": ALMOST, "is_causal": True}, WRONG),
    "hint and a bias": ({}, {"attn_mask": BIASED, "is_causal": True}, WRONG),
    "hint and the other triangle": ({}, {"attn_mask": LATER.T, "is_causal": True}, WRONG),
    "hint and no mask": ({}, {"attn_mask": torch.zeros(SIZE, SIZE), "is_causal": True}, WRONG),
    "hint and another size": ({}, {"attn_mask": LATER[:4, :4], "is_causal": True}, WRONG),
    "hint and other heads": (
        {},
        {"attn_mask": LATER.expand(3, -1, -1), "is_causal": True},
        WRONG,
    ),
    "other padding": ({}, {"key_padding_mask": PADDING}, "not the padding of this batch"),
    "bias on keys": ({}, {"key_padding_mask": PADDING * -0.5}, "not the padding of this batch"),
    "add_bias_kv": ({"add_bias_kv": True}, {}, "add_bias_kv=True gives each of the 1 ranks keys"),
    "add_zero_attn": ({"add_zero_attn": True}, {}, "add_zero_attn=True gives each"),
    "dropout": ({"dropout": 0.1}, {}, "attention dropout of 0.1 in training"),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("made", "options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refusals_name_the_module_and_the_way_out(
    made: dict[str, Any],
    options: dict[str, Any],
    message: str,
    need_weights: bool,
    x: Tensor,
    installation: Installation,
) -> None:
    attn = mha(**made)
    root = tree(attn)
    with (
        SLOT.activate(context(module=root)),
        pytest.raises(RefusedError, match=NAMED + message),
    ):
        attn(x, x, x, need_weights=need_weights, **options)


def test_dropout_in_eval_mode_and_triangles_per_head(x: Tensor, installation: Installation) -> None:
    attn = mha(dropout=0.5).eval()
    plain = attn(x, x, x, attn_mask=LATER)[0]
    heads = LATER.expand(BATCH * HEADS, -1, -1)
    least = torch.zeros(SIZE, SIZE).masked_fill(LATER, torch.finfo(torch.float32).min)
    with SLOT.activate(context()) as _:
        for mask in (LATER, FLOAT_LATER, heads, least):
            torch.testing.assert_close(attn(x, x, x, attn_mask=mask, is_causal=True)[0], plain)
        with pytest.raises(RuntimeError, match="Need attn_mask"):  # as on one device
            attn(x, x, x, is_causal=True)
