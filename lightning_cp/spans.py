"""Half-open integer spans and the set arithmetic on lists of them."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Span = tuple[int, int]
"""`(start, stop)`, half open: holds the integers start <= i < stop."""

Spans = tuple[Span, ...]


class Piece(NamedTuple):
    """Global positions `start..stop` held at the rows `row..row + stop - start` of a buffer."""

    start: int
    stop: int
    row: int


def total(spans: Iterable[Span]) -> int:
    """Number of integers in `spans` (counted once per span)."""
    return sum(stop - start for start, stop in spans)


def union(spans: Iterable[Span]) -> Spans:
    """Sorted, disjoint, non-adjacent spans that hold the same integers; empty ones vanish."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersection(left: Sequence[Span], right: Sequence[Span]) -> Spans:
    """Integers in both; each argument sorted and disjoint, as `union` returns them."""
    common: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        stop = min(left[i][1], right[j][1])
        if start < stop:
            common.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def gaps(span: Span, covered: Sequence[Span]) -> Spans:
    """The parts of `span` that lie in none of `covered`, sorted and disjoint."""
    found: list[Span] = []
    at, end = span
    index = max(bisect_right(covered, (at, float("inf"))) - 1, 0)
    for start, stop in covered[index:]:
        if start >= end:
            break
        if at < start:
            found.append((at, start))
        at = max(at, stop)
    if at < end:
        found.append((at, end))
    return tuple(found)


def pieces(spans: Iterable[Span]) -> tuple[Piece, ...]:
    """Rows of a buffer that holds `spans` one after the other, sorted by global position."""
    placed: list[Piece] = []
    row = 0
    for start, stop in spans:
        placed.append(Piece(start, stop, row))
        row += stop - start
    return tuple(sorted(placed))


def overlapping(sorted_pieces: Sequence[Piece], span: Span) -> Iterable[Piece]:
    """The parts of disjoint sorted pieces that fall into `span`, in order of position."""
    start, stop = span
    index = max(bisect_right(sorted_pieces, (start, float("inf"), 0)) - 1, 0)
    for piece in sorted_pieces[index:]:
        if piece.start >= stop:
            return
        low, high = max(piece.start, start), min(piece.stop, stop)
        if low < high:
            yield Piece(low, high, piece.row + low - piece.start)


def rows(sorted_pieces: Sequence[Piece], spans: Iterable[Span]) -> Spans:
    """Rows that hold `spans`, in the order of `spans`; rows that follow each other are joined.

    The spans must lie inside the pieces.
    """
    found: list[Span] = []
    for span in spans:
        for piece in overlapping(sorted_pieces, span):
            start, stop = piece.row, piece.row + piece.stop - piece.start
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return tuple(found)
