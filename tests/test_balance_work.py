"""Work functions, loads and bounds against the mask's own definition, token by token."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.balance import (
    Banded,
    Causal,
    Chunked,
    Piece,
    Prefixed,
    Problem,
    least_received,
    loads,
    work_of,
)
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan import build_plan
from lightning_cp.spans import union
from tests._harness.packed import MASKS, counted, packed_mask, problem

quick = settings(deadline=None, max_examples=60)


def layout_of_pieces(problem: Problem, held: list[list[Piece]]) -> Layout:
    firsts = [sum(problem.lengths[:doc]) for doc in range(len(problem.lengths))]
    return Layout(
        problem.tokens,
        tuple(
            union((firsts[p.doc] + p.start, firsts[p.doc] + p.stop) for p in own) for own in held
        ),
    )


@pytest.mark.parametrize("name", MASKS)
def test_work_is_the_mask_counted(name: str) -> None:
    work, like = MASKS[name]
    assert work_of(like) == work
    for length in range(9):
        mask = packed_mask((length,), like)
        seen = [{k for k in range(length) if mask.visible(q, k)} for q in range(length)]
        for stop in range(length + 1):
            assert work.before(length, stop) == sum(map(len, seen[:stop]))
            if not 0 < stop < length:
                continue
            below = {k for keys in seen[stop:] for k in keys if k < stop}
            above = {k for keys in seen[:stop] for k in keys if k >= stop}
            assert work.crossing(length, stop) == len(below) + len(above)
        for start, stop in combinations(range(length + 1), 2):
            seen_there = {k for keys in seen[start:stop] for k in keys}
            assert work.reach(length, start, stop) == (min(seen_there), max(seen_there) + 1)
        for pairs in range(work.before(length, length) + 2):
            stops = [s for s in range(length + 1) if work.before(length, s) <= pairs]
            assert work.fitting(length, pairs) == max(stops)


def test_masks_by_causality_and_window() -> None:
    assert work_of(Mask(4, 4, window=(None, 3))) == Causal()
    assert work_of(Mask(4, 4, window=(3, 5))) == Banded(3, 0)
    assert work_of(Mask.full(4)) == Banded(None, None)
    assert work_of(Mask(4, 4, prefix=(2, 2))) == Prefixed(2)
    assert work_of(Mask(4, 4, prefix=(0,), chunk=3)) == Chunked(3, Causal())


@pytest.mark.parametrize("chunk", [None, 3])
def test_rows_with_prefixes_of_their_own_are_counted_together(chunk: int | None) -> None:
    lengths, prefixes = (5, 4), (0, 2, 7)
    work = work_of(Mask(1, 1, chunk=chunk, prefix=prefixes))
    row = problem(lengths, 1, work=work)
    alone = [
        problem(lengths, 1, work=work_of(Mask(1, 1, chunk=chunk, prefix=(prefix,))))
        for prefix in prefixes
    ]
    assert work.mask(lengths).prefix == prefixes
    for doc, length in enumerate(lengths):
        works = [other.works[doc] for other in alone]
        for stop in range(length + 1):
            mean = sum(one.before(length, stop) for one in works) / len(works)
            assert 0 <= mean - row.works[doc].before(length, stop) < 1
            assert row.works[doc].fitting(length, row.works[doc].before(length, stop)) == stop
        for cut in range(1, length):
            found = row.works[doc].crossing(length, cut)
            assert found == max(one.crossing(length, cut) for one in works)
            assert row.works[doc].reach(length, 0, cut)[1] == max(
                one.reach(length, 0, cut)[1] for one in works
            )


def held_rows() -> st.SearchStrategy[tuple[tuple[int, ...], list[list[Piece]]]]:
    """Documents whose tokens are dealt to three ranks."""

    def dealt(lengths: tuple[int, ...], owners: list[int]) -> list[list[Piece]]:
        tokens = [(doc, i) for doc, length in enumerate(lengths) for i in range(length)]
        held: list[list[Piece]] = [[], [], []]
        for (doc, i), owner in zip(tokens, owners, strict=True):
            held[owner].append(Piece(doc, i, i + 1))
        return held

    return (
        st.lists(st.integers(0, 6), min_size=1, max_size=4)
        .map(tuple)
        .flatmap(
            lambda lengths: st.lists(
                st.integers(0, 2), min_size=sum(lengths), max_size=sum(lengths)
            ).map(lambda owners: (lengths, dealt(lengths, owners)))
        )
    )


@quick
@given(held_rows(), st.sampled_from(list(MASKS)))
def test_loads_are_the_mask_counted(
    row: tuple[tuple[int, ...], list[list[Piece]]], name: str
) -> None:
    lengths, held = row
    work, like = MASKS[name]
    found = loads(problem(lengths, 3, work=work), held)
    truth = counted(layout_of_pieces(problem(lengths, 3), held), packed_mask(lengths, like))
    assert found[:2] == truth[:2]
    if name not in ("ahead", "window", "prefix, window", "all"):
        assert found.received == truth.received


@quick
@given(held_rows(), st.sampled_from([name for name in MASKS if name not in ("ahead", "self")]))
def test_loads_are_those_of_the_plan(
    row: tuple[tuple[int, ...], list[list[Piece]]], name: str
) -> None:
    lengths, held = row
    work, like = MASKS[name]
    mask = packed_mask(lengths, like)
    layout = layout_of_pieces(problem(lengths, 3), held)
    found = loads(problem(lengths, 3, work=work), held)
    for rank in range(3):
        plan = build_plan(layout, layout, mask, rank=rank, exchange="direct")
        assert plan.work() == found.work[rank]
        assert plan.q_size == found.tokens[rank]
        received = sum(t.size for step in plan.rounds for t in step.receives)
        assert received == found.received[rank]


@pytest.mark.parametrize(
    ("lengths", "world"),
    [((7,), 2), ((5, 2), 2), ((4, 3, 1), 2), ((3, 3), 2), ((6,), 3), ((4, 2), 3), ((1, 1), 2)],
)
@pytest.mark.parametrize("caps", [(1.1, 1.2), (1.3, 1.5), (1.05, 3.0), (3.0, 1.01)])
def test_no_layout_receives_less_than_the_bound(
    lengths: tuple[int, ...], world: int, caps: tuple[float, float]
) -> None:
    row = problem(lengths, world, caps=caps)
    tokens = [(doc, i) for doc, length in enumerate(lengths) for i in range(length)]
    best = None
    for owners in product(range(world), repeat=len(tokens)):
        held: list[list[Piece]] = [[] for _ in range(world)]
        for (doc, i), owner in zip(tokens, owners, strict=True):
            held[owner].append(Piece(doc, i, i + 1))
        found = loads(row, held)
        if not row.excess(found.work, found.tokens):
            best = min(sum(found.received), best if best is not None else 10**9)
    assert best is None or least_received(row) <= best


def test_the_bound_of_a_long_document() -> None:
    whole = problem((1000,), 2, caps=(1.0, 1.5))
    # A tail with half of the pairs: 1000 * 1001 / 4 pairs lie past the token 707.
    assert least_received(whole) == 708 - 1
    even = problem((1000,), 2, caps=(1.0, 1.0))
    # Half of the tokens as well: a head of 250, which is below the cut and travels for nothing.
    assert least_received(even) in range(749, 752)
    assert least_received(problem((10, 10), 2)) == 0
    assert least_received(problem((), 2)) == 0
