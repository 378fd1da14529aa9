"""Where to cut a document for a rank that still lacks work.

[Note: prices] A rank that holds the end of a cut document may hold its head as well: it receives
the keys up to its last query anyway. So missing tokens come, cheapest first, from short whole
documents (nothing travels), from the head of the document that the rank holds the end of (its
work is little, and nothing more travels), and from the head of another document.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

from lightning_cp.balance.pool import Pool
from lightning_cp.balance.problem import Problem, Rest
from lightning_cp.balance.rounding import round_down, round_up

TRIES = 6
"""How many of the smallest documents that are large enough to be cut are tried."""

NEVER = 1e18
"""Added to the price of a cut that leaves to the other ranks more than they can take."""


class Limits(NamedTuple):
    """Work and tokens of a rank: the most, its share, and the least.

    Work is filled up to the most, tokens up to a goal. The least is what the ranks that come later
    cannot take over.
    """

    cap_work: float
    cap_tokens: float
    goal_tokens: float
    fair_work: float
    fair_tokens: float
    low_work: float
    low_tokens: float


class Cut(NamedTuple):
    """A part of a document.

    Attributes:
        price: keys that travel more, and an estimate for the work that is still missing.
        place: its index in the pool.
        at: the part is what lies behind this token, or before it.
        tail: whether it lies behind.
        own: the missing tokens are then the head of the same document.
    """

    price: float
    place: int
    at: int
    tail: bool
    own: bool


class Cutter:
    """Finds cuts for a rank.

    Args:
        problem: what is balanced.
        pool: what is left; its sums are up to date.
        limits: of the rank.
        held: work and tokens that the rank has already.
    """

    def __init__(
        self, problem: Problem, pool: Pool, limits: Limits, held: tuple[int, int], lack: float
    ) -> None:
        self.problem, self.pool, self.limits = problem, pool, limits
        self.work, self.tokens = held
        self.lack = lack

    def best(self, *, only_longest: bool) -> Cut | None:
        """The cheapest cut, None where there is none."""
        last = len(self.pool.rests) - 1
        if only_longest:
            return min(self._tails(last), default=None)
        first = bisect_left(self.pool.rests, (self.limits.cap_work - self.work,))
        some = range(first, min(first + TRIES, last + 1))
        indices = sorted({*some, *range(max(first, last - 1), last + 1), last})
        cuts = [cut for index in indices for cut in self._tails(index)]
        heads = (self._head(index) for index in indices)
        return min([*cuts, *(head for head in heads if head is not None)], default=None)

    def _tails(self, index: int) -> Iterator[Cut]:
        """The longest tails that fit with their ballast: the own head, or that of another."""
        for own in (True, False):
            cut = self._tail(index, own)
            if cut is not None:
                yield cut

    def _tail(self, index: int, own: bool) -> Cut | None:
        rest, limits, least = self.pool.rests[index], self.limits, self.problem.min_piece

        def work(at: int) -> int:
            return self._with_tail(index, rest, at, own)[0]

        first = max(rest.start, rest.stop - int(limits.cap_tokens - self.tokens))
        fits = bisect_left(
            range(rest.stop),
            True,
            lo=min(first, rest.stop),
            key=lambda at: work(at) <= limits.cap_work,
        )
        at = max(fits, rest.start + least)
        enough = self._enough(work(at))
        at = round_up(at, self.problem.align, lambda at: work(at) >= enough)
        if at > rest.stop - least:
            return None
        total, head, short = self._with_tail(index, rest, at, own)
        travels = self.problem.works[rest.doc].crossing(self.problem.lengths[rest.doc], at)
        return Cut(travels + head + 2 * short + self._lack(total), index, at, True, own)

    def _with_tail(self, index: int, rest: Rest, at: int, own: bool) -> tuple[int, int, int]:
        """Work with a tail and its ballast, keys that the ballast moves, tokens still missing."""
        pool = self.pool
        work = self.work + pool.pairs(rest, at, rest.stop)
        missing = self.limits.goal_tokens - self.tokens - (rest.stop - at)
        filled, count, tokens = pool.filler(missing, index)
        work += filled
        if not tokens:
            return work, 0, 0
        if own:
            stop = min(rest.start + tokens, at)
            work += pool.pairs(rest, rest.start, stop)
            return work, 0, tokens - (stop - rest.start)
        if count == index:
            return work, 0, tokens
        other = pool.rests[count]
        stop = min(other.start + tokens, other.stop)
        work += pool.pairs(other, other.start, stop)
        length = self.problem.lengths[other.doc]
        moved = self.problem.works[other.doc].crossing(length, stop) if stop < length else 0
        return work, moved, tokens - (stop - other.start)

    def _head(self, index: int) -> Cut | None:
        """The head that has the work that is missing."""
        rest, limits, least = self.pool.rests[index], self.limits, self.problem.min_piece
        length, mask = self.problem.lengths[rest.doc], self.problem.works[rest.doc]

        def work(at: int) -> int:
            return self.work + self.pool.pairs(rest, rest.start, at)

        pairs = mask.before(length, rest.start) + int(limits.cap_work - self.work)
        room = rest.start + int(limits.cap_tokens - self.tokens)
        at = min(mask.fitting(length, pairs), room, rest.stop - least)
        if at < rest.start + least:
            return None
        enough = self._enough(work(at))
        at = round_down(at, self.problem.align, lambda at: work(at) >= enough)
        if at < rest.start + least:
            return None
        short = max(0.0, limits.goal_tokens - self.tokens - (at - rest.start))
        travels = mask.crossing(length, at)
        return Cut(travels + short + self._lack(work(at)), index, at, False, False)

    def _enough(self, work: int) -> float:
        """Work that a cut has to leave when it is rounded, where it has `work` as it is."""
        fair = self.limits.fair_work if work >= self.limits.fair_work else 0.0
        return max(self.limits.low_work, fair)

    def _lack(self, work: int) -> float:
        """What the work that is still missing will cost: the head of a document that has it."""
        price = self.lack * sqrt(2 * max(self.limits.cap_work - work, 0))
        return price + NEVER if work < self.limits.low_work else price
