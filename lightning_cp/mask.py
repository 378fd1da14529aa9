"""Who may attend to whom, in global positions: a union of full and causal rectangles."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

from lightning_cp.errors import BatchError, RefusedError
from lightning_cp.spans import Span, Spans

Edges = tuple[int, ...]
"""Cumulative document lengths of a row: `(0, ..., length)`."""

Documents = Edges | tuple[Edges, ...]
"""Edges that all rows share, or those of every row."""


Window = tuple[int | None, int | None]
"""How many keys before and after its own position a query sees, None for all of them."""

Band = tuple[int, int]
"""Smallest and largest distance, both included, from a query to a key that it sees."""

MaskMod = Callable[[Any, Any, Any, Any], Any]
"""`mask_mod(b, h, q, k)`: whether query `q` of batch row `b` sees key `k` in head `h`.

The arguments are integer tensors that broadcast against each other, `q` and `k` global positions;
the result is a bool tensor of their common shape.
"""

ANONYMOUS = 64
"""How many functions without a name of their own are remembered at a time."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What one attention call asks for, by global position; documents and padding are the batch's.

    Args:
        is_causal: hide keys after the query.
        window: how many keys before and after its own position a query sees; None for no limit
            on that side, or on either.
        chunk: a query sees keys of its own chunk alone: of the positions `n * chunk` to
            `(n + 1) * chunk`, counted from the first key of its document that is no padding.
        prefix: how many positions at the start of a row see each other although `is_causal`: one
            number for every batch row, or a single one for all.

    Raises:
        BatchError: if the window is no pair of integers of at least 0, or None; the chunk no
            positive integer; the prefix no tuple of integers of at least 0, or without
            `is_causal`.
    """

    is_causal: bool = True
    window: Window | None = None
    chunk: int | None = None
    prefix: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_window(self.window)
        if self.chunk is not None and not (_is_side(self.chunk) and self.chunk > 0):
            raise BatchError(
                f"chunk={self.chunk!r} must be a positive integer: how many positions see each "
                f"other, or None for no chunks"
            )
        if self.prefix is None:
            return
        whole = isinstance(self.prefix, tuple) and None not in self.prefix
        if not (self.prefix and whole and all(map(_is_side, self.prefix))):
            raise BatchError(
                f"prefix={self.prefix!r} must be a tuple of integers of at least 0: how many "
                f"positions at the start of every batch row see each other"
            )
        if not self.is_causal:
            raise BatchError(
                "prefix has no effect without is_causal=True: all positions see each other then"
            )

    @property
    def rows(self) -> int | None:
        """Number of batch rows with a prefix of their own; None where all rows are alike."""
        return len(self.prefix) if self.prefix and len(self.prefix) > 1 else None


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
    given; `i - left <= j <= i + right` where `window=(left, right)` is given; both lie in the same
    chunk where `chunk` is given. `prefix` lifts causality alone: where `i` and `j` are both less
    than the prefix of row `b`. Positions at or past `q_length` / `kv_length` are dummies: they see
    nothing and are seen by nobody.

    Args:
        q_length: number of real queries of the whole sequence.
        kv_length: number of real keys.
        is_causal: hide keys after the query.
        documents: cumulative document lengths `(0, ..., q_length)` of all rows, or a tuple of them
            with one for every batch row; zero-length documents are skipped. Needs
            `q_length == kv_length`.
        keys: for every batch row the span of visible keys (left and right padding cut off).
        window: see `Visibility`, as are the others.
        chunk: size of a chunk.
        prefix: positions at the start of every row, or of all.

    Raises:
        BatchError: if `documents` is not a non-decreasing tuple from 0 to the length, a span of
            `keys` lies outside `0..kv_length`, `documents`, `keys` and `prefix` are for different
            numbers of rows, or what the call asks for is refused by `Visibility`.
    """

    q_length: int
    kv_length: int
    is_causal: bool = True
    documents: Documents | None = None
    keys: tuple[Span, ...] | None = None
    window: Window | None = None
    chunk: int | None = None
    prefix: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.documents is not None:
            for edges in rows_of(self.documents) or (self.edges(),):
                self._check_documents(edges)
        asked = Visibility(self.is_causal, self.window, self.chunk, self.prefix)
        counts = {
            "documents": len(rows_of(self.documents)),
            "visible keys": len(self.keys or ()),
            "prefixes": asked.rows or 0,
        }
        if len(set(counts.values()) - {0}) > 1:
            raise BatchError(
                f"{' and '.join(f'{name} of {rows}' for name, rows in counts.items() if rows)} "
                f"batch rows; give one for every row, or one that all rows share"
            )
        for row, (start, stop) in enumerate(self.keys or ()):
            if not 0 <= start <= stop <= self.kv_length:
                raise BatchError(
                    f"visible keys {start}..{stop} of batch row {row} lie outside "
                    f"0..{self.kv_length}; give every row one (start, stop) with start <= stop "
                    f"inside the sequence, (0, 0) where all is padding"
                )

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
        for own in (self.keys or (), rows_of(self.documents), self.prefix or ()):
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
        first, last = (0, self.kv_length) if not self.keys else self.keys[row or 0]
        prefix = self._prefix(row or 0)
        found: list[Rect] = []
        for start, stop in self._blocks(row):
            k = (max(start, first), min(stop, last))
            free = stop if not self.is_causal else min(max(start, prefix), stop)
            for q, causal in (((start, free), False), ((free, stop), True)):
                q, seen = (q[0], min(q[1], self.q_length)), (k[0], min(k[1], free))
                if causal:
                    q, seen = (max(q[0], k[0]), q[1]), (k[0], min(k[1], q[1]))
                if q[0] < q[1] and seen[0] < seen[1]:
                    found.extend(self._narrowed(q, seen, causal))
        return tuple(found)

    def _blocks(self, row: int | None) -> Spans:
        """Spans of positions that may see each other: documents, cut into chunks."""
        documents = pairwise(self.edges(row))
        if self.chunk is None:
            return tuple(documents)
        edges = {edge for start, stop in documents for edge in self._chunks(row or 0, start, stop)}
        return tuple(pairwise(sorted(edges)))

    def _chunks(self, row: int, start: int, stop: int) -> Edges:
        """Where the chunks of a document start, and where it starts and stops."""
        assert self.chunk is not None  # invariant: asked of masks with chunks only
        return (start, *range(self._origin(row, start), stop, self.chunk), stop)

    def _origin(self, row: int, start: int) -> int:
        """Where the chunks of a document that starts at `start` are counted from."""
        return max(start, self.keys[row][0]) if self.keys else start

    def _prefix(self, row: int) -> int:
        if self.prefix is None:
            return 0
        return self.prefix[row] if len(self.prefix) > 1 else self.prefix[0]

    def _narrowed(self, q: Span, k: Span, causal: bool) -> tuple[Rect, ...]:
        """What of a rectangle the window leaves; nothing where it hides all."""
        if self.window is None:
            return (Rect(q, k, causal),)
        before, after = self.window
        low, high = k[0] - q[1] + 1, k[1] - 1 - q[0]  # the distances that there are
        first = low if before is None else max(low, -before)
        last = high if after is None else min(high, after)
        last = min(last, 0) if causal else last
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
        if self.is_causal and k > q and k >= self._prefix(row):
            return False
        if self.chunk is not None:
            start = max((edge for edge in self.edges(row) if edge <= k), default=0)
            first = self._origin(row, start)
            if (q - first) // self.chunk != (k - first) // self.chunk:
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


class MaskMods:
    """Functions that hide keys, by name: a name can be part of a compiled graph.

    [Note: names of mask functions] Names must be the same on peers, which compare them, and the
    same for every run of a graph. A function that is passed as it is gets a name made of its own,
    with a number where another function has it; of these the ones used last are kept. The number
    is not compared: it counts what the process called before.
    """

    def __init__(self) -> None:
        self._declared: dict[str, MaskMod] = {}
        self._passed: OrderedDict[str, MaskMod] = OrderedDict()

    def declare(self, name: str, function: MaskMod) -> None:
        """Give a function a name, for good.

        Raises:
            RefusedError: if another function has it.
        """
        if self._declared.setdefault(name, function) is not function:
            raise RefusedError(
                f"mask_mod {name!r} is the name of another function already; use another name"
            )

    def name(self, function: MaskMod) -> str:
        """The name of a function."""
        names = self._declared, self._passed
        for name in (name for known in names for name, one in known.items() if one == function):
            if name in self._passed:
                self._passed.move_to_end(name)
            return name
        base = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        number, name = 0, base
        while name in self._declared or name in self._passed:
            number, name = number + 1, f"{base}#{number + 1}"
        self._passed[name] = function
        while len(self._passed) > ANONYMOUS:
            self._passed.popitem(last=False)
        return name

    def told(self, name: str) -> str:
        """What of the name of a function is compared with peers."""
        return name if name in self._declared else name.partition("#")[0]

    def find(self, name: str) -> MaskMod:
        """The function of a name.

        Raises:
            RefusedError: if there is none, or none any more.
        """
        known = self._declared.get(name) or self._passed.get(name)
        if known is None:
            raise RefusedError(
                f"mask_mod {name!r} is no declared function, or one of more than {ANONYMOUS} that "
                f"were passed without a name; give it one with "
                f"lightning_cp.functional.register_mask_mod"
            )
        return known
