"""Work of masks that cut documents up, or tell them apart: chunks and prefixes; work by mask."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_cp.balance.work import Banded, Causal, Work, fitting, least_of, rising
from lightning_cp.mask import Mask, Visibility


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Causal attention, but the first `prefix` positions of the row see each other (prefix-LM).

    A query sees at most `left` keys before its own, and `right` after it.
    """

    prefix: int
    left: int | None = None
    right: int | None = None

    def at(self, first: int, length: int) -> "Causal | Banded | Prefixed":
        """The part of the prefix that lies in the document; there may be none."""
        if first < self.prefix:
            return Prefixed(self.prefix - first, self.left, self.right)
        return Causal() if self.left is None else Banded(self.left, 0)

    def before(self, length: int, stop: int) -> int:
        """Own keys and those before, and those after in the prefix, summed over the queries."""
        free = min(self.prefix, length)
        after = rising(free, self.right) - rising(free - min(stop, free), self.right)
        return stop + rising(stop, self.left) + after

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        return fitting(self, length, pairs)

    def crossing(self, length: int, cut: int) -> int:
        """Keys before the cut that queries after it see; in the prefix, the other way round too."""
        after = max(0, min(self.prefix, length) - cut)
        return least_of(cut, self.left) + least_of(after, self.right)

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """All keys up to the last query, or in the prefix, within the band."""
        after = max(0, min(self.prefix, length) - stop)
        return start - least_of(start, self.left), stop + least_of(after, self.right)

    def parts(self, length: int, least: int) -> Sequence[int]:
        """The document."""
        return (length,)

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Causal attention within documents, but for the prefix."""
        edges, window = (0, *accumulate(lengths)), (self.left, self.right)
        return Mask(edges[-1], edges[-1], documents=edges, window=window, prefix=(self.prefix,))


@dataclass(frozen=True, slots=True)
class Chunked:
    """A query sees keys of its own chunk alone, of `chunk` positions from its document's start.

    `inner` says which of them: a chunk is to it what a document is without chunks.
    """

    chunk: int
    inner: Causal | Banded | Prefixed

    def at(self, first: int, length: int) -> Work:
        """The chunks of a document with what of the prefix lies in it; one that is short is one."""
        if length <= self.chunk:
            return self.inner.at(first, length)
        if isinstance(self.inner, Prefixed):
            return Chunked(self.chunk, self.inner.at(first, length))
        return self

    def before(self, length: int, stop: int) -> int:
        """Whole chunks and the part of one.

        Chunks within a prefix are alike, and so are those behind it; one may have its end.
        """
        count, part = divmod(stop, self.chunk)
        inside = min(count, self.inner.prefix // self.chunk)
        ends = min(count - inside, 1)
        found = (
            inside * self._whole(0)
            + ends * self._whole(inside)
            + (count - inside - ends) * self._whole(inside + 1)
        )
        first = count * self.chunk
        size = min(self.chunk, length - first)
        return found + (self.inner.at(first, size).before(size, part) if part else 0)

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        return fitting(self, length, pairs)

    def crossing(self, length: int, cut: int) -> int:
        """What travels within the chunk that is cut; nothing between chunks."""
        first = cut - cut % self.chunk
        size = min(self.chunk, length - first)
        return self.inner.at(first, size).crossing(size, cut - first) if cut > first else 0

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """From the first key of the first query's chunk to the last of the last query's."""
        first, last = start - start % self.chunk, (stop - 1) - (stop - 1) % self.chunk
        low, _ = self._reach(length, first, start, min(stop, first + self.chunk))
        _, high = self._reach(length, last, max(start, last), stop)
        return low, high

    def parts(self, length: int, least: int) -> Sequence[int]:
        """Chunks, or several together, and what is left."""
        size = self.chunk * max(1, -(-least // self.chunk))
        whole, rest = divmod(length, size)
        return (*(size,) * whole, *((rest,) if rest else ()))

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Attention within chunks of documents."""
        return replace(self.inner.mask(lengths), chunk=self.chunk)

    def _whole(self, number: int) -> int:
        return self.inner.at(number * self.chunk, self.chunk).before(self.chunk, self.chunk)

    def _reach(self, length: int, first: int, start: int, stop: int) -> tuple[int, int]:
        """The keys of queries within the chunk that starts at `first`."""
        size = min(self.chunk, length - first)
        low, high = self.inner.at(first, size).reach(size, start - first, stop - first)
        return first + low, first + high


@dataclass(frozen=True, slots=True)
class Rows:
    """Batch rows that share a layout and differ in their prefixes: a mean over them."""

    works: tuple[Work, ...]

    def at(self, first: int, length: int) -> Work:
        """Those of every row."""
        return Rows(tuple(work.at(first, length) for work in self.works))

    def before(self, length: int, stop: int) -> int:
        """The mean over the rows, rounded down."""
        return sum(work.before(length, stop) for work in self.works) // len(self.works)

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        return fitting(self, length, pairs)

    def crossing(self, length: int, cut: int) -> int:
        """Those of the row with the most: a key travels with all rows of the batch."""
        return max(work.crossing(length, cut) for work in self.works)

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """What the queries of one of the rows see."""
        lows, highs = zip(*(work.reach(length, start, stop) for work in self.works), strict=True)
        return min(lows), max(highs)

    def parts(self, length: int, least: int) -> Sequence[int]:
        """Those of any row: prefixes do not matter to them."""
        return self.works[0].parts(length, least)

    def mask(self, lengths: Sequence[int]) -> Mask:
        """That of a row with a prefix, with the prefixes of all."""
        masks = [work.mask(lengths) for work in self.works]
        prefixes = tuple(prefix for mask in masks for prefix in mask.prefix or (0,))
        return replace(max(masks, key=lambda mask: mask.prefix or (0,)), prefix=prefixes)


def work_of(mask: Mask | Visibility) -> Work:
    """The work function of a mask: of its causality, window, chunks and prefix.

    Documents and padding are not part of it: work is asked for every document, and padding is not
    counted. What a `mask_mod` hides besides is not known, and counts as if it were seen.
    """
    prefixes = mask.prefix or (0,)
    works = tuple(_of_row(mask, prefix) for prefix in prefixes)
    return works[0] if len(set(works)) == 1 else Rows(works)


def _of_row(mask: Mask | Visibility, prefix: int) -> Work:
    """That of a row with a prefix."""
    left, right = mask.window or (None, None)
    inner: Causal | Banded | Prefixed = Banded(left, right)
    if mask.is_causal and prefix:
        inner = Prefixed(prefix, left, right)
    elif mask.is_causal:
        inner = Causal() if left is None else Banded(left, 0)
    return inner if mask.chunk is None else Chunked(mask.chunk, inner)
