"""Span arithmetic against sets and lists of integers."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.spans import (
    Piece,
    Span,
    Spans,
    intersection,
    overlapping,
    pieces,
    rows,
    total,
    union,
)
from tests._harness.simulate import spans_within

SPANS = st.lists(spans_within(30), max_size=8)
quick = settings(deadline=None, max_examples=150)


def members(spans: list[Span] | Spans) -> set[int]:
    return {i for start, stop in spans for i in range(start, stop)}


def listed(spans: list[Span] | Spans) -> list[int]:
    return [i for start, stop in spans for i in range(start, stop)]


@st.composite
def disjoint(draw: st.DrawFn) -> list[Span]:
    """Non-empty disjoint spans, neighbours allowed, in random order."""
    edges = sorted(draw(st.sets(st.integers(0, 30), max_size=10)))
    spans = list(pairwise(edges))
    return draw(st.permutations([span for span in spans if draw(st.booleans())]))


def placed_rows(spans: list[Span]) -> dict[int, int]:
    return {position: row for row, position in enumerate(listed(spans))}


@quick
@given(SPANS)
def test_total_counts_every_span(spans: list[Span]) -> None:
    assert total(spans) == len(listed(spans))


@quick
@given(SPANS)
def test_union_holds_the_same_integers_in_the_fewest_sorted_spans(spans: list[Span]) -> None:
    found = union(spans)
    assert members(found) == members(spans)
    assert all(start < stop for start, stop in found)
    assert all(left[1] < right[0] for left, right in pairwise(found))


def test_union_joins_neighbours_and_drops_empty_spans() -> None:
    assert union([(5, 7), (3, 3), (0, 2), (2, 4), (6, 6)]) == ((0, 4), (5, 7))
    assert union([]) == ()


@quick
@given(SPANS, SPANS)
def test_intersection_holds_the_common_integers(left: list[Span], right: list[Span]) -> None:
    found = intersection(union(left), union(right))
    assert listed(found) == sorted(members(left) & members(right))
    assert all(start < stop for start, stop in found)


@quick
@given(disjoint())
def test_pieces_number_the_rows_in_the_order_given(spans: list[Span]) -> None:
    found = pieces(spans)
    at = {p.start + i: p.row + i for p in found for i in range(p.stop - p.start)}
    assert at == placed_rows(spans)
    assert list(found) == sorted(found)


@quick
@given(disjoint(), spans_within(30))
def test_overlapping_keeps_the_rows_of_what_lies_inside(spans: list[Span], span: Span) -> None:
    found = list(overlapping(pieces(spans), span))
    at = {p.start + i: p.row + i for p in found for i in range(p.stop - p.start)}
    inside = {p: row for p, row in placed_rows(spans).items() if span[0] <= p < span[1]}
    assert at == inside
    assert found == sorted(found)
    assert all(piece.start < piece.stop for piece in found)


def test_overlapping_clips_both_ends() -> None:
    held = pieces([(10, 20), (0, 5)])
    assert list(overlapping(held, (3, 12))) == [Piece(3, 5, 13), Piece(10, 12, 0)]
    assert list(overlapping(held, (5, 10))) == []
    assert list(overlapping((), (0, 9))) == []


@quick
@given(disjoint(), st.data())
def test_rows_follow_the_order_of_the_spans(spans: list[Span], data: st.DataObject) -> None:
    at = placed_rows(spans)
    asked = data.draw(st.permutations(union(spans)))
    found = rows(pieces(spans), asked)
    assert listed(found) == [at[position] for position in listed(asked)]
    assert all(left[1] != right[0] for left, right in pairwise(found))


def test_rows_join_neighbours_only() -> None:
    held = pieces([(10, 20), (0, 5), (5, 8)])
    assert rows(held, [(0, 8)]) == ((10, 18),)
    assert rows(held, [(0, 5), (10, 12)]) == ((10, 15), (0, 2))
    assert rows(held, []) == ()
