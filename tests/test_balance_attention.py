"""Attention with the balanced layout, every rank in turn in one process, against one process."""

from itertools import accumulate, pairwise

import pytest
import torch

from lightning_cp.balance import Balanced, layout_of, work_of
from lightning_cp.kernels import KERNELS
from lightning_cp.mask import Mask, Window
from lightning_cp.plan import SCHEDULES
from tests._harness import oracle
from tests._harness.grid import rotated
from tests._harness.turns import Group, run, tensors

ROWS = {
    "four lengths": (1, 137, 241, 89),
    "mixed degrees": (260, 1, 1, 40, 33, 7, 90, 1),
    "empty ranks": (3,),
    "one-token documents": (1,) * 9,
    "one document": (211,),
    "empty documents": (0, 50, 0, 61, 0),
}
EXACT = 1e-12
CAUSAL, FULL = (True, None), (False, None)
VISIBLE: tuple[tuple[bool, Window | None], ...] = (CAUSAL, FULL, (True, (16, 0)), (False, (9, 5)))


def group(
    name: str, world: int, exchange: str, seen: tuple[bool, Window | None], layout: str
) -> Group:
    lengths = ROWS[name]
    edges = (0, *accumulate(lengths))
    mask = Mask(edges[-1], edges[-1], seen[0], documents=edges, window=seen[1])
    choice = Balanced(min_piece=1, align=1) if layout == "exact" else layout
    held = layout_of(choice, lengths, world, work=work_of(mask))
    return Group(world, exchange, held, mask, 0.3)


@pytest.mark.parametrize(
    ("name", "world", "exchange", "seen", "layout"),
    rotated(
        [*ROWS] * 3,
        [
            (world, exchange, seen, layout)
            for world in (2, 3, 4)
            for exchange in SCHEDULES
            for seen in VISIBLE
            for layout in ("balanced", "exact", "per_document_zigzag")
        ][::5],
    ),
)
def test_gradients_are_those_of_one_process(
    name: str, world: int, exchange: str, seen: tuple[bool, Window | None], layout: str
) -> None:
    ranks = group(name, world, exchange, seen, layout)
    inputs = tensors(ranks.mask.q_length, batch=1)
    found = run(ranks, KERNELS["sdpa"], inputs)
    truth = oracle.attention(*inputs, ranks.mask, scale=ranks.scale)
    for part in oracle.Answer._fields:
        error = (getattr(found, part) - getattr(truth, part)).abs().max()
        assert error <= EXACT, f"{part} of {ranks.layout.spans}"


@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)]
)
def test_gradients_of_a_long_row(world: int) -> None:
    lengths = (1, 137, 2041, 89)
    edges = (0, *accumulate(lengths))
    mask = Mask.packed(edges)
    ranks = Group(world, "direct", layout_of("balanced", lengths, world), mask, 0.3)
    inputs = tensors(mask.q_length, batch=1, heads=(2, 1))
    found = run(ranks, KERNELS["sdpa"], inputs)
    truth = oracle.attention(*inputs, mask, scale=ranks.scale)
    for part in oracle.Answer._fields:
        assert (getattr(found, part) - getattr(truth, part)).abs().max() <= EXACT, part


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_a_document_moves_no_other(world: int, kernel: str) -> None:
    lengths = ROWS["mixed degrees"]
    ranks = group("mixed degrees", world, "direct", CAUSAL, "exact")
    inputs = tensors(sum(lengths), batch=1)
    before = run(ranks, KERNELS[kernel], inputs)
    edges = (0, *accumulate(lengths))
    for doc in (0, 3, 6):
        inside = torch.zeros(sum(lengths), dtype=torch.bool)
        inside[edges[doc] : edges[doc + 1]] = True
        moved = [x.clone() for x in inputs]
        for x in moved:
            x[:, :, inside] += 1.0
        after = run(ranks, KERNELS[kernel], (moved[0], moved[1], moved[2], moved[3]))
        for part in oracle.Answer._fields:
            old, new = getattr(before, part), getattr(after, part)
            assert torch.equal(old[:, :, ~inside], new[:, :, ~inside]), part
            assert not torch.equal(old[:, :, inside], new[:, :, inside])


def test_rows_are_split_over_several_degrees() -> None:
    layout = group("mixed degrees", 4, "direct", CAUSAL, "exact").layout
    edges = (0, *accumulate(ROWS["mixed degrees"]))
    degrees = {
        sum(any(a < stop and start < b for a, b in own) for own in layout.spans)
        for start, stop in pairwise(edges)
    }
    assert len(degrees) > 2
