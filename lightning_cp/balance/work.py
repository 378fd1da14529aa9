"""How much attention work a part of a document is, and what a cut makes travel: by mask."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import Protocol

from lightning_cp.mask import Mask, Visibility


class Work(Protocol):
    """What a mask costs within one document of `length` tokens. Pure integers, hashable."""

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

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Who sees whom in a row of documents of these lengths."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Every query sees itself and what is before it in its document."""

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

    def before(self, length: int, stop: int) -> int:
        """Own keys, those before and those after, summed over the queries."""
        after = _rising(length, self.right) - _rising(length - stop, self.right)
        return stop + _rising(stop, self.left) + after

    def fitting(self, length: int, pairs: int) -> int:
        """The inverse of `before`, rounded down."""
        stops = range(length + 1)
        return bisect_right(stops, pairs, key=lambda stop: self.before(length, stop)) - 1

    def crossing(self, length: int, cut: int) -> int:
        """Keys before the cut that queries after it see, and the other way round."""
        return _least(cut, self.left) + _least(length - cut, self.right)

    def reach(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """All keys within the band of one of the queries."""
        return start - _least(start, self.left), stop + _least(length - stop, self.right)

    def mask(self, lengths: Sequence[int]) -> Mask:
        """Attention within a band and within documents."""
        edges, window = (0, *accumulate(lengths)), (self.left, self.right)
        return Mask(edges[-1], edges[-1], is_causal=False, documents=edges, window=window)


def work_of(mask: Mask | Visibility) -> Work:
    """The work function of a mask: of its causality and window, within one document.

    A chunk counts as a window of its size, which is the most that a query of it sees; a prefix
    does not count.
    """
    left, right = mask.window or (None, None)
    if mask.chunk is not None:
        left, right = (_least(mask.chunk - 1, side) for side in (left, right))
    if mask.is_causal:
        return Causal() if left is None else Banded(left, 0)
    return Banded(left, right)


def _rising(count: int, most: int | None) -> int:
    """`0 + 1 + ...`, so many terms of which none is greater than `most`."""
    bent = _least(count, None if most is None else most + 1)
    return bent * (bent - 1) // 2 + (count - bent) * (most or 0)


def _least(count: int, most: int | None) -> int:
    return count if most is None else min(count, most)
