"""Fill one rank after the other: whole documents, a cut where work is missing, then ballast."""

from bisect import bisect_right
from math import fsum
from typing import NamedTuple

from lightning_cp.balance.closing import mirrored
from lightning_cp.balance.cuts import Cut, Cutter, Limits
from lightning_cp.balance.pool import Pool
from lightning_cp.balance.problem import Held, Piece, Problem, Rest
from lightning_cp.balance.rounding import round_down

CUTS = 6
"""How many documents are cut for one rank, at most."""

SMALL = 0.3
"""Part of the room between share and cap up to which a document is not cut to close a rank."""


class Style(NamedTuple):
    """How ranks are filled.

    Work is filled up to the cap, for what the first ranks take beyond their share is room to
    spare for the last.

    Attributes:
        tokens: how far from its share towards its cap a rank's tokens are filled up, from 0 to 1.
        longest: where the longest document does not fit, it is the first to be cut.
        lack: weight of the work that a cut leaves missing, against the keys that travel.
    """

    tokens: float
    longest: bool = True
    lack: float = 1.0


def fill(problem: Problem, style: Style) -> Held:
    """Pieces of every rank, which keep the caps but for rare cases; fastest ranks first."""
    return _Filling(problem, style).run()


class _Filling:
    """What is left, and the rank that is being filled."""

    def __init__(self, problem: Problem, style: Style) -> None:
        self.problem, self.style = problem, style
        self.pool = Pool(problem, problem.rests())
        self.pairs, self.all_tokens = problem.pairs, problem.tokens
        self.work = self.tokens = 0
        self.pieces: list[Piece] = []

    def run(self) -> Held:
        shares = self.problem.shares
        held: Held = [[] for _ in shares]
        order = sorted(range(len(shares)), key=lambda rank: (-shares[rank], rank))
        rest_work, rest_tokens = self.pairs, self.all_tokens
        for place, rank in enumerate(order[:-1], 1):
            later = fsum(shares[other] for other in order[place:])
            limits = self._limits(shares[rank], later, rest_work, rest_tokens)
            before = list(self.pool.rests)
            self._start()
            self._fill(limits)
            if self.work < limits.low_work or self.tokens < limits.low_tokens:
                self._close(limits, shares[rank] / (shares[rank] + later), before)
            held[rank] = self.pieces
            rest_work -= self.work
            rest_tokens -= self.tokens
        held[order[-1]] = [Piece(rest.doc, rest.start, rest.stop) for rest in self.pool.rests]
        return held

    def _start(self) -> None:
        self.work = self.tokens = 0
        self.pieces = []

    def _close(self, limits: Limits, part: float, rests: list[Rest]) -> None:
        """Fill the rank with a part of everything, with cuts as coarse as its limits allow."""
        small = (
            SMALL * (limits.cap_work - limits.fair_work),
            SMALL * (limits.cap_tokens - limits.fair_tokens),
        )
        align = self.problem.align
        while True:
            self._start()
            self.pool.rests = list(rests)
            for piece, work in mirrored(self.pool, part, small=small, align=align):
                self._add(piece, work)
            kept = limits.low_work <= self.work <= limits.cap_work and (
                limits.low_tokens <= self.tokens <= limits.cap_tokens
            )
            if kept or align == 1:
                return
            align = max(1, align // 4)

    def _limits(self, share: float, later: float, work: int, tokens: int) -> Limits:
        """Of a rank with a share, where so much is left and ranks of the share `later` follow."""
        (cap_work, cap_tokens), fair_tokens = self.problem.caps, share * self.all_tokens
        low_tokens = tokens - later * self.all_tokens * cap_tokens
        goal = max(low_tokens, fair_tokens * (1 + self.style.tokens * (cap_tokens - 1)))
        return Limits(
            cap_work=share * self.pairs * cap_work,
            cap_tokens=fair_tokens * cap_tokens,
            goal_tokens=min(goal, fair_tokens * cap_tokens),
            fair_work=share * self.pairs,
            fair_tokens=fair_tokens,
            low_work=work - later * self.pairs * cap_work,
            low_tokens=low_tokens,
        )

    def _add(self, piece: Piece, work: int) -> None:
        self.pieces.append(piece)
        self.work += work
        self.tokens += piece.stop - piece.start

    def _fill(self, limits: Limits) -> None:
        self.pool.index()
        self._whole(limits)
        for _ in range(CUTS):
            self.pool.index()
            if self.work >= limits.fair_work or not self.pool.rests:
                break
            cutter = Cutter(
                self.problem, self.pool, limits, (self.work, self.tokens), self.style.lack
            )
            cut = cutter.best(only_longest=self.style.longest and not self.pieces)
            if cut is None:
                break
            doc = self._cut(cut)
            self._ballast(limits, doc if cut.own else None)
        self._ballast(limits, None)

    def _whole(self, limits: Limits) -> None:
        """The longest documents that leave room for the work of the tokens that are missing."""
        high = len(self.pool.rests)
        while high:
            index = high - 1
            if not self._fits(index, limits):
                if high == len(self.pool.rests) and not self.pieces:
                    return  # the longest document of all has to be cut
                index = self._largest(index, limits)
                if index < 0:
                    return
            rest = self.pool.pop(index)
            self._add(Piece(rest.doc, rest.start, rest.stop), rest.work)
            high = index

    def _largest(self, high: int, limits: Limits) -> int:
        """The last of the first `high` that fits, -1 where none does."""
        low = 0
        while low < high:
            middle = (low + high) // 2
            if self._fits(middle, limits):
                low = middle + 1
            else:
                high = middle
        return low - 1

    def _fits(self, index: int, limits: Limits) -> bool:
        """Whether one fits whole, and what is then missing can be had."""
        rests = self.pool.rests
        rest = rests[index]
        tokens = self.tokens + rest.stop - rest.start
        work = self.work + rest.work
        if tokens > limits.cap_tokens:
            return False
        if work + self.pool.filled(limits.goal_tokens - tokens, index) > limits.cap_work:
            return False
        longest = rests[-1] if index < len(rests) - 1 else rests[index - 1]
        return work + self._most(longest, int(limits.cap_tokens - tokens)) >= limits.low_work

    def _most(self, longest: Rest, tokens: int) -> float:
        """About the most work that so many tokens of the longest documents have."""
        size = longest.stop - longest.start
        if tokens < size:
            return self.pool.pairs(longest, longest.stop - tokens, longest.stop)
        return longest.work * tokens / size

    def _cut(self, cut: Cut) -> int:
        """Give the rank a part of a document, whose number is returned."""
        rest = self.pool.pop(cut.place)
        given, left = (rest.start, cut.at), (cut.at, rest.stop)
        if cut.tail:
            given, left = left, given
        work = self.pool.pairs(rest, *given)
        self._add(Piece(rest.doc, *given), work)
        self.pool.add(Rest(rest.work - work, rest.doc, *left))
        return rest.doc

    def _ballast(self, limits: Limits, own: int | None) -> None:
        """The smallest documents up to the goal of tokens, then one head: of `own`, or the next."""
        self.pool.index()
        filler = self.pool.filler(limits.goal_tokens - self.tokens, len(self.pool.rests))
        room = limits.cap_work - self.work
        count = min(filler.whole, bisect_right(self.pool.sum_work, room) - 1)
        for rest in self.pool.rests[:count]:
            self._add(Piece(rest.doc, rest.start, rest.stop), rest.work)
        del self.pool.rests[:count]
        missing = int(limits.goal_tokens - self.tokens)
        if missing <= 0 or not self.pool.rests:
            return
        docs = [rest.doc for rest in self.pool.rests]
        index = docs.index(own) if own in docs else 0
        rest = self.pool.rests[index]
        length, mask = self.problem.lengths[rest.doc], self.problem.works[rest.doc]
        pairs = int(limits.cap_work - self.work) + mask.before(length, rest.start)
        least = self.problem.min_piece
        at = min(rest.start + missing, mask.fitting(length, pairs), rest.stop - least)
        needed = limits.low_tokens - self.tokens + rest.start
        at = round_down(at, self.problem.align, lambda x: x >= needed)
        if at >= rest.start + least:
            self._cut(Cut(0.0, index, at, False, False))
