"""What no layout can beat: a lower bound on the keys that ranks receive under causal attention.

A document whose ranks own it up to the ends `c_1 <= ... <= c_k = length` makes them receive
`c_1 + ... + c_(k-1)` keys: what a rank owns below its own end need not travel. For every j the j
ranks with the greatest ends own all of the document past `c_(k-j)`, and that has to fit:

- its tokens, and its pairs, into the caps of j ranks;
- its pairs together with the cheapest pairs of the tokens that the other ranks' caps leave to
  these j: those of the heads of all documents, filled up to one level like water.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from lightning_cp.balance.problem import Problem


def least_received(problem: Problem) -> int:
    """Keys that all ranks together receive at least, within the caps, with causal attention.

    How documents get into each other's way is not counted: 0 where each fits on a rank.
    """
    tokens, pairs = problem.tokens, problem.pairs
    shares = sorted(problem.shares, reverse=True)
    water = _Water([length for length in problem.lengths if length])
    most = [
        (part * pairs * problem.caps[0], part * tokens * problem.caps[1])
        for part in accumulate(shares)
    ]
    found = 0
    for length in problem.lengths:
        for count, (work, room) in enumerate(most[:-1], 1):
            others = sum(shares[-(problem.world - count) :])
            forced = max(0.0, tokens - others * tokens * problem.caps[1])
            end = _least_end(length, work, room, forced, water)
            if end == 0:
                break
            found += end
    return found


def _least_end(length: int, work: float, room: float, forced: float, water: "_Water") -> int:
    """The smallest `c` so that all past it fits into `room` tokens and `work` pairs."""
    whole = length * (length + 1) // 2

    def fits(end: int) -> bool:
        past = whole - end * (end + 1) // 2
        return past <= work and past + water.pairs(forced - (length - end)) <= work

    low = max(0, length - int(room))
    return bisect_left(range(length), True, lo=min(low, length), key=fits)


class _Water:
    """Heads of documents that are filled up to one level."""

    def __init__(self, lengths: list[int]) -> None:
        self._levels = sorted(lengths)
        below = [0, *accumulate(self._levels)]
        filled = [0, *accumulate(n * (n + 1) // 2 for n in self._levels)]
        count = len(lengths)
        self._tokens = [below[i] + (count - i) * n for i, n in enumerate(self._levels)]
        self._below, self._filled, self._count = below, filled, count

    def pairs(self, tokens: float) -> int:
        """The fewest pairs that so many tokens of the row have."""
        if tokens <= 0:
            return 0
        full = min(bisect_right(self._tokens, tokens), self._count - 1)
        level = min(int((tokens - self._below[full]) / (self._count - full)), self._levels[-1])
        return self._filled[full] + (self._count - full) * (level * (level + 1) // 2)
