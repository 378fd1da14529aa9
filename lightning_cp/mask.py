"""Who may attend to whom, in global positions: a union of full and causal rectangles."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

from lightning_cp.errors import BatchError
from lightning_cp.spans import Span, Spans

Edges = tuple[int, ...]
"""Cumulative document lengths of a row: `(0, ..., length)`."""

Documents = Edges | tuple[Edges, ...]
"""Edges that all rows share, or those of every row."""


Window = tuple[int | None, int | None]
"""How many keys before and after its own position a query sees, None for all of them."""

Band = tuple[int, int]
"""Smallest and largest distance, both included, from a query to a key that it sees."""


class Rect(NamedTuple):
    """Queries `q` may see keys `k`: all, those at or before the query, or those in a band."""

    q: Span
    k: Span
    causal: bool
    band: Band | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """Visibility of keys to queries, the same for every head.

    Query `i` of batch row `b` sees key `j` if all of these hold: `j <= i` where `is_causal`; both
    lie in the same document where `documents` is given; `j` lies in `keys[b]` where `keys` is
    given; `i - left <= j <= i + right` where `window=(left, right)` is given. Positions at or past
    `q_length` / `kv_length` are dummies: they see nothing and are seen by nobody.

    Args:
        q_length: number of real queries of the whole sequence.
        kv_length: number of real keys.
        is_causal: hide keys after the query.
        documents: cumulative document lengths `(0, ..., q_length)` of all rows, or a tuple of them
            with one for every batch row; zero-length documents are skipped. Needs
            `q_length == kv_length`.
        keys: for every batch row the span of visible keys (left and right padding cut off).
        window: how many keys before and after its own position a query sees; None for no limit
            on that side, or on either.

    Raises:
        BatchError: if `documents` is not a non-decreasing tuple from 0 to the length, has another
            number of rows than `keys`, a span of `keys` lies outside `0..kv_length`, or a side
            of `window` is no integer of at least 0.
    """

    q_length: int
    kv_length: int
    is_causal: bool = True
    documents: Documents | None = None
    keys: tuple[Span, ...] | None = None
    window: Window | None = None

    def __post_init__(self) -> None:
        if self.documents is not None:
            for edges in rows_of(self.documents) or (self.edges(),):
                self._check_documents(edges)
        own = rows_of(self.documents)
        if own and self.keys and len(own) != len(self.keys):
            raise BatchError(
                f"documents of {len(own)} batch rows and visible keys of {len(self.keys)}; give "
                f"one tuple of document edges for every row, or one that all rows share"
            )
        for row, (start, stop) in enumerate(self.keys or ()):
            if not 0 <= start <= stop <= self.kv_length:
                raise BatchError(
                    f"visible keys {start}..{stop} of batch row {row} lie outside "
                    f"0..{self.kv_length}; give every row one (start, stop) with start <= stop "
                    f"inside the sequence, (0, 0) where all is padding"
                )

        check_window(self.window)

    def _check_documents(self, edges: Edges) -> None:
        rising = all(low <= high for low, high in pairwise(edges))
        if (
            self.q_length != self.kv_length
            or not edges
            or (edges[0] != 0 or edges[-1] != self.q_length or not rising)
        ):
            raise BatchError(
                f"document edges {edges[:8]}{'...' if len(edges) > 8 else ''} must rise from 0 to "
                f"the sequence length {self.q_length} (cumulative lengths, queries and keys of "
                f"one sequence); got last edge {edges[-1] if edges else None} and "
                f"{self.kv_length} keys"
            )

    @classmethod
    def causal(cls, length: int) -> "Mask":
        """Every query sees itself and what is before it."""
        return cls(length, length)

    @classmethod
    def full(cls, q_length: int, kv_length: int | None = None) -> "Mask":
        """Every query sees every key."""
        return cls(q_length, q_length if kv_length is None else kv_length, is_causal=False)

    @classmethod
    def packed(cls, cu_seqlens: Sequence[int], *, is_causal: bool = True) -> "Mask":
        """Documents packed into one row, given by their cumulative lengths."""
        edges = tuple(int(edge) for edge in cu_seqlens)
        length = edges[-1] if edges else 0
        return cls(length, length, is_causal, documents=edges)

    @property
    def rows(self) -> tuple[int | None, ...]:
        """Batch rows with a visibility of their own; `(None,)` where all rows are alike."""
        for own in (self.keys or (), rows_of(self.documents)):
            if len(set(own)) > 1:
                return tuple(range(len(own)))
        return (None,)

    def edges(self, row: int | None = None) -> Edges:
        """Cumulative document lengths of a batch row, of the first where None.

        One document, which covers queries and keys, where none are given.
        """
        if self.documents is None:
            return (0, max(self.q_length, self.kv_length))
        own = rows_of(self.documents)
        return own[row or 0] if own else cast(Edges, self.documents)

    def rects(self, row: int | None = None) -> tuple[Rect, ...]:
        """The visible rectangles of one of `rows`, sorted, with disjoint query spans."""
        blocks: Spans = tuple(pairwise(self.edges(row)))
        first, last = (0, self.kv_length) if not self.keys else self.keys[row or 0]
        found: list[Rect] = []
        for start, stop in blocks:
            q = (start, min(stop, self.q_length))
            k = (max(start, first), min(stop, last))
            if self.is_causal:
                q = (max(q[0], k[0]), q[1])
                k = (k[0], min(k[1], q[1]))
            if q[0] < q[1] and k[0] < k[1]:
                found.extend(self._narrowed(q, k))
        return tuple(found)

    def _narrowed(self, q: Span, k: Span) -> tuple[Rect, ...]:
        """What of a rectangle the window leaves; nothing where it hides all."""
        if self.window is None:
            return (Rect(q, k, self.is_causal),)
        before, after = self.window
        low, high = k[0] - q[1] + 1, k[1] - 1 - q[0]  # the distances that there are
        first = low if before is None else max(low, -before)
        last = high if after is None else min(high, after)
        last = min(last, 0) if self.is_causal else last
        q = (max(q[0], k[0] - last), min(q[1], k[1] - first))
        k = (max(k[0], q[0] + first), min(k[1], q[1] + last))
        if q[0] >= q[1] or k[0] >= k[1]:
            return ()
        unbound = first <= k[0] - q[1] + 1
        if unbound and last >= k[1] - 1 - q[0]:
            return (Rect(q, k, False),)
        causal = unbound and last == 0
        return (Rect(q, k, causal, None if causal else (first, last)),)

    def visible(self, q: int, k: int, *, row: int = 0) -> bool:
        """Whether query `q` of batch row `row` sees key `k`: the definition, element by element."""
        if not (0 <= q < self.q_length and 0 <= k < self.kv_length):
            return False
        if self.is_causal and k > q:
            return False
        if self.keys and not self.keys[row][0] <= k < self.keys[row][1]:
            return False
        before, after = self.window or (None, None)
        if (before is not None and k < q - before) or (after is not None and k > q + after):
            return False
        if self.documents is None:
            return True
        return not any(min(q, k) < edge <= max(q, k) for edge in self.edges(row))


def rows_of(documents: Documents | None) -> tuple[Edges, ...]:
    """The edges of every row where rows have their own, else an empty tuple."""
    if documents and isinstance(documents[0], tuple):
        return documents
    return ()


def check_window(window: Window | None) -> Window | None:
    """The window, if it is one.

    Raises:
        BatchError: if it is no pair of integers that are at least 0, or None.
    """
    if window is not None and not (
        isinstance(window, tuple | list) and len(window) == 2 and all(map(_is_side, window))
    ):
        raise BatchError(
            f"window={window} must be (left, right): how many keys before and after its own "
            f"position a query sees, each at least 0, or None for no limit"
        )
    return window


def _is_side(side: object) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)
