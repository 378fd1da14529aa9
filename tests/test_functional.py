"""The public functions outside a context: what plain torch does on one device."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import functional
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.layout import Layout, contiguous
from lightning_cp.sequences import Sequence

B, S, D = 2, 5, 3


def context(length: int = S, layout: Layout | None = None) -> Context:
    layout = layout or contiguous(length, 1)
    return Context(
        rank=0,
        world=1,
        group=None,
        meta=None,
        sequences={"s": Sequence(layout=layout, length=length, batch=B)},
        exchange="ring",
    )


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, S, D, generator=generator, dtype=torch.float64, requires_grad=True)


MASK = torch.tensor([[True, False, True, True, False], [False] * 5])
NUMBERS = torch.tensor([[1.0, 0.0, 0.5, 2.0, 0.0], [0.0] * 5], dtype=torch.float64)

SAME: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sum": (functional.sequence_sum, lambda x: x.sum(1)),
    "sum-keepdim": (
        lambda x: functional.sequence_sum(x, dim=-1, keepdim=True),
        lambda x: x.sum(-1, keepdim=True),
    ),
    "sum-weighed": (
        lambda x: functional.sequence_sum(x, mask=NUMBERS),
        lambda x: (x * NUMBERS[..., None]).sum(1),
    ),
    "mean": (lambda x: functional.sequence_mean(x, dim=0), lambda x: x.mean(0)),
    "mean-masked": (
        lambda x: functional.sequence_mean(x, mask=MASK),
        lambda x: torch.stack([x[0, MASK[0]].mean(0), 0 * x[1, 0]]),
    ),
    "max": (functional.sequence_max, lambda x: x.amax(1)),
    "max-masked": (
        lambda x: functional.sequence_max(x, mask=NUMBERS)[0],
        lambda x: x[0, MASK[0]].amax(0),
    ),
    "gather": (functional.gather_sequence, lambda x: x.clone()),
    "scatter": (functional.scatter_sequence, lambda x: x.clone()),
    "cumsum": (lambda x: functional.cumsum(x, dim=-2), lambda x: x.cumsum(1)),
    "softmax": (functional.global_softmax, lambda x: x.softmax(-1)),
    "softmax-masked": (
        lambda x: functional.global_softmax(x, dim=1, mask=MASK, method="three_step")[0],
        lambda x: x[0].masked_fill(~MASK[0, :, None], -math.inf).softmax(0),
    ),
}


@pytest.mark.parametrize("inside", [False, True], ids=["no-context", "context-of-one-rank"])
@pytest.mark.parametrize(("ours", "plain"), SAME.values(), ids=list(SAME))
def test_values_and_gradients(ours: Any, plain: Any, inside: bool, x: Tensor) -> None:
    """Of a context of one rank too, along dims of its length."""
    size = B if plain is SAME["mean"][1] else D if plain(x).shape == x.sum(-1, True).shape else S
    if ours is functional.global_softmax:
        size = D
    with SLOT.activate(context(size) if inside else None):
        found = ours(x)
        (grad,) = torch.autograd.grad(found.cos().sum(), x)
    expected = plain(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.cos().sum(), x)[0])


def test_nothing_that_counts() -> None:
    x = torch.full((1, 3), math.nan, requires_grad=True)
    hidden = torch.zeros(1, 3, dtype=torch.bool)
    mean = functional.sequence_mean(x, mask=hidden)
    assert mean.tolist() == [0.0]
    assert functional.sequence_sum(x, mask=hidden).tolist() == [0.0]
    assert functional.sequence_max(x, mask=hidden).tolist() == [-math.inf]
    weights = functional.global_softmax(x, mask=hidden)
    assert weights.tolist() == [[0.0] * 3]
    (mean.sum() + weights.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0] * 3]
    ones = torch.ones(1, 3)
    signed = torch.tensor([1.0, -2.0, 1.0])
    assert functional.sequence_mean(ones.cumsum(1).square(), mask=signed).isinf().all()
    assert functional.sequence_max(torch.zeros(2, 0, dtype=torch.int8)).tolist() == [-128, -128]
    assert functional.sequence_max(torch.tensor([[False, True]])).tolist() == [True]


def test_ties_share_the_gradient() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0]], requires_grad=True)
    functional.sequence_max(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.5, 0.5, 0.0]]


def test_learned_weights_have_a_gradient(x: Tensor) -> None:
    weights = torch.rand(B, S, dtype=torch.float64, requires_grad=True)
    functional.sequence_mean(x, mask=weights).cos().sum().backward()
    found = weights.grad
    weights.grad = None
    total = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    total.cos().sum().backward()
    torch.testing.assert_close(found, weights.grad)


def test_results_are_new_tensors(x: Tensor) -> None:
    """A result may be changed in place without changing what it came from."""
    values = x.detach()
    before = values.clone()
    for call in (functional.gather_sequence, functional.scatter_sequence):
        for active in (None, context()):
            with SLOT.activate(active):
                call(values).add_(1)
    assert torch.equal(values, before)


def test_labels() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert functional.shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
    shifted = functional.shift_labels(labels, dim=0, ignore_index=-1)
    assert shifted.tolist() == [[4, 5, 6], [-1, -1, -1]]
    assert functional.shift_labels(labels[:, :0]).shape == (2, 0)
    with pytest.raises(RefusedError, match=r"takes integers, not torch\.float32"):
        functional.shift_labels(torch.zeros(2, 3))


def test_masks_that_fit_and_others() -> None:
    x = torch.arange(float(B * S * D)).view(B, S, D)
    whole = functional.sequence_sum(x, mask=torch.ones(B, S, D))
    for shape in ((S,), (B, S), (1, S), (B, S, 1), (1, 1, 1), (B, 1, D)):
        assert torch.equal(functional.sequence_sum(x, mask=torch.ones(shape)), whole), shape
        rounded = functional.sequence_mean(x, mask=torch.ones(shape))
        torch.testing.assert_close(rounded, x.mean(1))
    for shape in ((S, D), (B, D), (D,), (B, S, 2), (1, B, S, D)):
        with pytest.raises(RefusedError, match=r"does not fit.*one weight per token.*\(2, 5\)"):
            functional.sequence_sum(x, mask=torch.ones(shape))
    with pytest.raises(RefusedError, match=r"shape \(2, 5, 3\) has no dim 3"):
        functional.sequence_sum(x, dim=3)


def test_unknown_method() -> None:
    with pytest.raises(RefusedError, match="use packed or three_step"):
        functional.global_softmax(torch.zeros(2), method="other")  # type: ignore[arg-type]


def test_lengths_that_cannot_be_told_apart() -> None:
    two = {
        name: Sequence(layout=layout, length=4, batch=B)
        for name, layout in (("a", contiguous(4, 1)), ("b", Layout(5, (((0, 5),),))))
    }
    active = Context(rank=0, world=1, group=None, meta=None, sequences=two, exchange="ring")
    with SLOT.activate(active):
        with pytest.raises(RefusedError, match="length of several different sequences"):
            functional.scatter_sequence(torch.zeros(2, 4))
        with pytest.raises(
            RefusedError, match=r"3 tokens are no declared sequence's length.*local"
        ):
            functional.scatter_sequence(torch.zeros(2, 3))


def test_a_rank_without_tokens() -> None:
    """The first of two ranks holds nothing: each result is that of an empty sum or maximum."""
    layout = Layout(0, ((),))
    x = torch.zeros(B, 0, D, requires_grad=True)
    with SLOT.activate(context(0, layout)):
        assert functional.sequence_sum(x).tolist() == [[0.0] * D] * B
        assert functional.sequence_mean(x).tolist() == [[0.0] * D] * B
        assert functional.sequence_max(x).tolist() == [[-math.inf] * D] * B
        for call in (functional.gather_sequence, functional.scatter_sequence):
            assert call(x).shape == x.shape
        assert functional.cumsum(x, dim=1).shape == x.shape
        assert functional.global_softmax(x, dim=1).shape == x.shape
        assert functional.positions(0).shape == (0,)


OPERATORS: dict[str, tuple[Any, ...]] = {
    "group_sum": (),
    "sequence_sums": (torch.rand(B, S, 1, dtype=torch.float64, requires_grad=True), 1),
    "sequence_max": (1,),
    "gather_sequence": (1,),
    "scatter_sequence": (1,),
    "cumsum": (1,),
    "global_softmax": (1, True),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_their_contracts(name: str, x: Tensor) -> None:
    torch.library.opcheck(
        getattr(torch.ops.lightning_cp, name).default,
        (x, *OPERATORS[name]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
