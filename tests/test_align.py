"""A whole tensor and a rank's part of it are compared at the same tokens."""

import math

import pytest
import torch
from torch import Tensor

from lightning_cp.context import Context
from lightning_cp.diagnostics.verify.align import coarsest, difference, furthest, relative
from lightning_cp.layout import zigzag
from lightning_cp.sequences import Sequence

LENGTH, BATCH, RANK, WORLD = 7, 2, 1, 3


def context(keys: tuple[tuple[int, int], ...] | None = None) -> Context:
    """Rank 1 of 3; the sequence is filled up with dummies."""
    sequence = Sequence(layout=zigzag(9, WORLD), length=LENGTH, batch=BATCH, keys=keys)
    return Context(
        rank=RANK, world=WORLD, group=None, meta=None, sequences={"s": sequence}, exchange="ring"
    )


def part_of(whole: Tensor, dim: int) -> Tensor:
    """This rank's part, dummies filled with something else."""
    layout = zigzag(9, WORLD)
    positions = layout.positions(RANK)
    filled = torch.cat([whole, torch.full_like(whole.narrow(dim, 0, 2), 99)], dim)
    return filled.index_select(dim, positions)


WHOLES = {
    "[B, S, C]": (torch.randn(BATCH, LENGTH, 5), (1,)),
    "[B, C, S]": (torch.randn(BATCH, 5, LENGTH), (2,)),
    "[S, B, C]": (torch.randn(LENGTH, BATCH, 5), (0,)),
    "[B, H, S, S]": (torch.randn(BATCH, 4, LENGTH, LENGTH), (2, 3)),
    "[S]": (torch.randn(LENGTH), (0,)),
    "integers": (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH), (1,)),
    "complex": (torch.randn(BATCH, LENGTH, dtype=torch.complex64), (1,)),
    "no sequence": (torch.randn(BATCH, 5), ()),
}


@pytest.mark.parametrize(("whole", "dims"), WHOLES.values(), ids=list(WHOLES))
def test_a_part_is_equal_and_a_wrong_part_is_not(whole: Tensor, dims: tuple[int, ...]) -> None:
    part = whole
    for dim in dims:
        part = part_of(part, dim)
    assert difference(whole, part, context()).error == 0
    wrong = part.clone()
    wrong.view(-1)[0] += 1  # the first token of this rank is no dummy
    assert difference(whole, wrong, context()).error > 0.05


def test_rows_and_tokens_in_one_dimension() -> None:
    whole = torch.randn(BATCH, LENGTH, 5)
    part = part_of(whole, 1)
    assert difference(whole.flatten(0, 1), part.flatten(0, 1), context()).error == 0
    part[1, 0] += 1
    assert difference(whole.flatten(0, 1), part.flatten(0, 1), context()).error > 0.1


def test_rows_that_are_alike() -> None:
    whole = torch.arange(LENGTH)
    part = part_of(whole, 0).expand(BATCH, -1)
    assert difference(whole, part, context()).error == 0
    assert difference(whole[None], part, context()).error == 0
    assert difference(whole, part + 1, context()).error > 0


def test_padding_is_left_out() -> None:
    keys = ((0, 4), (3, 7))
    whole = torch.randn(BATCH, LENGTH, 5)
    part = part_of(whole, 1)
    hidden = ~context(keys).sequences["s"].visible_keys(RANK)
    assert hidden.any()
    part[hidden] = 5.0
    assert difference(whole, part, context(keys)).error == 0
    assert difference(whole.flatten(0, 1), part.flatten(0, 1), context(keys)).error == 0
    assert difference(whole.transpose(0, 1), part.transpose(0, 1), context(keys)).error == 0
    assert difference(whole, part, context()).error > 0


@pytest.mark.parametrize("shape", [(BATCH, 5), (BATCH, LENGTH + 1, 5), (BATCH, 4, 3, 5)])
def test_other_shapes_do_not_fit(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(BATCH, LENGTH, 5)
    assert math.isinf(difference(whole, torch.zeros(shape), context()).error)


def test_what_is_no_number_is_equal_to_itself_alone() -> None:
    inf, nan = torch.tensor([1.0, math.inf, math.nan]), torch.tensor([1.0, math.nan, math.nan])
    assert difference(inf, inf, context()).error == 0
    assert math.isinf(difference(inf, nan, context()).error)


def test_the_tolerance_is_that_of_the_coarser_dtype() -> None:
    exact = {"x": torch.ones(3, dtype=torch.float64)}
    near = {"x": torch.ones(3) * (1 + 5e-5)}
    assert furthest(exact, near, context()) == pytest.approx(0.5, rel=1e-2)
    assert furthest(exact, {"x": near["x"].double()}, context()) > 1000
    assert furthest({"x": torch.tensor(1)}, {"x": torch.tensor(2)}, context()) > 1
    assert furthest(exact, {"y": near["x"]}, context()) == 0  # only what both have
    assert coarsest([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)]) == 5e-2
    assert coarsest([torch.tensor(1)]) == 0


def test_small_values_are_compared_with_a_scale() -> None:
    assert relative(torch.tensor([1e-9]), torch.tensor([0.0]), scale=1.0) == pytest.approx(1e-9)
    assert relative(torch.tensor([1e-9]), torch.tensor([0.0]), scale=0.0) == pytest.approx(1e-9)
    assert relative(torch.tensor([2.0]), torch.tensor([1.0]), scale=0.5) == 1.0
