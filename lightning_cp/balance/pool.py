"""The documents, or their parts, that no rank has yet."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_cp.balance.problem import Problem, Rest


class Filler(NamedTuple):
    """The cheapest tokens of a pool.

    Attributes:
        work: their work.
        whole: so many of the smallest documents, whole.
        tokens: so many tokens more, the head of another document.
    """

    work: int
    whole: int
    tokens: int


class Pool:
    """What is left of the documents, sorted by work, with sums over the smallest.

    Args:
        problem: what is balanced.
        rests: what is left, sorted.
    """

    def __init__(self, problem: Problem, rests: Sequence[Rest]) -> None:
        self._lengths, self._works = problem.lengths, problem.works
        self.rests = list(rests)
        self.index()

    def index(self) -> None:
        """Bring the sums up to date after changes."""
        self.sum_tokens = [0, *accumulate(rest.stop - rest.start for rest in self.rests)]
        self.sum_work = [0, *accumulate(rest.work for rest in self.rests)]

    def pairs(self, rest: Rest, start: int, stop: int) -> int:
        """Work of the tokens `start..stop` of the document of `rest`."""
        length, before = self._lengths[rest.doc], self._works[rest.doc].before
        return before(length, stop) - before(length, start)

    def pop(self, index: int) -> Rest:
        """Take out one; the sums are those of before."""
        return self.rests.pop(index)

    def add(self, rest: Rest) -> None:
        """Put back what is left of a document; the sums are those of before."""
        insort(self.rests, rest)

    def filler(self, tokens: float, below: int) -> Filler:
        """The smallest documents that together have at most so many tokens, and what is missing.

        Args:
            tokens: how many; none where it is not positive.
            below: only documents before this index.
        """
        if tokens <= 0:
            return Filler(0, 0, 0)
        count = min(bisect_right(self.sum_tokens, tokens) - 1, below)
        return Filler(self.sum_work[count], count, int(tokens) - self.sum_tokens[count])

    def filled(self, tokens: float, below: int) -> int:
        """Work of so many of the cheapest tokens, the last ones the head of a document."""
        work, count, more = self.filler(tokens, below)
        if count < below and more:
            rest = self.rests[count]
            work += self.pairs(rest, rest.start, min(rest.start + more, rest.stop))
        return work
