"""How much attention work a part of a document is, and what a cut makes travel: by mask."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import ClassVar, Protocol

from lightning_cp.mask import Mask


class Work(Protocol):
    """What a mask costs within one document of `length` tokens. Pure integers, hashable."""

    def at(self, first: int, length: int) -> "Work":
        """What it costs in the document of `length` tokens from the position `first` of the row.

        A prefix tells documents of a row apart. The other methods are for the document at its
        start.
        """
        ...

    def before(self, length: int, stop: int) -> int:
        """Visible (query, key) pairs of the queries `0..stop`; grows with `stop`."""
        ...

    def fitting(self, length: int, pairs: int) -> int:
        """The greatest `stop` for which `before(length, stop)` is at most `pairs`."""
        ...

    def crossing(self, length: int, cut: int) -> int:
        """Keys that travel where `0..cut` and `cut..length` lie on two ranks; neither is empty."""
        ...

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """The span of keys that the queries `start..stop` see."""
        ...

    def parts(self, length: int, least: int) -> Sequence[int]:
        """Lengths of the parts of a document that see nothing of each other, in order.

        Parts of fewer than `least` tokens are joined with those that follow.
        """
        ...

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Who sees whom in a row of documents of these lengths."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Every query sees itself and what is before it in its document."""

    prefix: ClassVar[int] = 0

    def at(self, first: int, length: int) -> Work:
        """The same everywhere."""
        return self

    def before(self, length: int, stop: int) -> int:
        """`1 + 2 + ... + stop`."""
        return stop * (stop + 1) // 2

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        return min((isqrt(8 * pairs + 1) - 1) // 2, length)

    def crossing(self, length: int, cut: int) -> int:
        """All keys before the cut."""
        return cut

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """All keys up to the last query."""
        return (0, stop)

    def parts(self, length: int, least: int) -> Sequence[int]:
        """The document."""
        return (length,)

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Causal attention within documents."""
        return Mask.packed((0, *accumulate(lengths)))


@dataclass(frozen=True, slots=True)
class Banded:
    """A query sees `left` keys before and `right` keys after its own; None for all of them.

    `Banded(None, None)` is bidirectional attention, `Banded(511, 0)` a causal window of 512 keys.
    """

    left: int | None = None
    right: int | None = None
    prefix: ClassVar[int] = 0

    def at(self, first: int, length: int) -> Work:
        """The same everywhere."""
        return self

    def before(self, length: int, stop: int) -> int:
        """Own keys, those before and those after, summed over the queries."""
        after = rising(length, self.right) - rising(length - stop, self.right)
        return stop + rising(stop, self.left) + after

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        return fitting(self, length, pairs)

    def crossing(self, length: int, cut: int) -> int:
        """Keys before the cut that queries after it see, and the other way round."""
        return least_of(cut, self.left) + least_of(length - cut, self.right)

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """All keys within the band of one of the queries."""
        return start - least_of(start, self.left), stop + least_of(length - stop, self.right)

    def parts(self, length: int, least: int) -> Sequence[int]:
        """The document."""
        return (length,)

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Attention within a band and within documents."""
        edges, window = (0, *accumulate(lengths)), (self.left, self.right)
        return Mask(edges[-1], edges[-1], is_causal=False, documents=edges, window=window)


def fitting(work: Work, length: int, pairs: int) -> int:
    """The inverse of `before`, rounded down, of any work."""
    stops = range(length + 1)
    return bisect_right(stops, pairs, key=lambda stop: work.before(length, stop)) - 1


def rising(count: int, most: int | None) -> int:
    """`0 + 1 + ...`, so many terms of which none is greater than `most`."""
    bent = least_of(count, None if most is None else most + 1)
    return bent * (bent - 1) // 2 + (count - bent) * (most or 0)


def least_of(count: int, most: int | None) -> int:
    """The count, but no more than `most`."""
    return count if most is None else min(count, most)
