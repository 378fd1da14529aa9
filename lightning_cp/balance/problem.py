"""What is to be balanced: a row of documents, the ranks with their caps, and pieces of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_cp.balance.work import Work
from lightning_cp.spans import Spans, union


class Piece(NamedTuple):
    """Tokens `start..stop` of the document `doc`, counted from its first token."""

    doc: int
    start: int
    stop: int


class Rest(NamedTuple):
    """What is left of a document, `start..stop`, and its work; in the order of work."""

    work: int
    doc: int
    start: int
    stop: int


Held = list[list[Piece]]
"""Pieces by rank."""

ROUNDING = 1e-9
"""Of a rank's share, which a cap of floating-point numbers may be missed by."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A row and the ranks that share it.

    Attributes:
        lengths: tokens of every document, in the order of the row.
        work: what the mask costs.
        shares: part of the row that each rank should have; the sum is 1.
        caps: greatest work and tokens of a rank over its share of them.
        align: cuts lie on multiples of this from the first token of a document, where a finer cut
            is not needed to keep a cap.
        min_piece: least tokens of a piece of a document that is cut.
    """

    lengths: tuple[int, ...]
    work: Work
    shares: tuple[float, ...]
    caps: tuple[float, float]
    align: int = 1
    min_piece: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Work of the row."""
        return sum(self.work.before(length, length) for length in self.lengths)

    def rests(self) -> list[Rest]:
        """All documents, sorted by work; empty ones are left out."""
        found = enumerate(self.lengths)
        before = self.work.before
        return sorted(Rest(before(n, n), doc, 0, n) for doc, n in found if n)

    def excess(self, work: Sequence[int], tokens: Sequence[int]) -> float:
        """By how much the rank that is worst is over a cap, in shares; 0 where all are within."""
        over = [0.0]
        for total, loads, cap in (
            (self.pairs, work, self.caps[0]),
            (self.tokens, tokens, self.caps[1]),
        ):
            if total:
                over += [
                    load / (share * total) - cap
                    for load, share in zip(loads, self.shares, strict=True)
                ]
        worst = max(over)
        return worst if worst > ROUNDING else 0.0

    @property
    def feasible(self) -> bool:
        """Whether the caps leave every rank room for one token more than its share.

        Tokens cannot be divided: with less room than the longest query's work, or than one token,
        a layout that keeps the caps need not exist.
        """
        longest = max(self.lengths, default=0)
        query = self.work.before(longest, longest) - self.work.before(longest, longest - 1)
        share = min(self.shares)
        room = [(cap - 1) * share for cap in self.caps]
        return bool(longest) and room[0] * self.pairs >= query and room[1] * self.tokens >= 1


class Loads(NamedTuple):
    """What a plan gives the ranks.

    Attributes:
        work: pairs of every rank.
        tokens: tokens of every rank.
        received: keys that every rank receives.
        fragments: pieces of every rank, neighbours joined.
        keys: keys that a query sees on average, summed over the pieces: the pairs that one more
            query in each piece would add.
    """

    work: tuple[int, ...]
    tokens: tuple[int, ...]
    received: tuple[int, ...]
    fragments: tuple[int, ...]
    keys: tuple[float, ...]


def joined(pieces: Sequence[Piece]) -> dict[int, Spans]:
    """The spans of every document, sorted, neighbours joined; documents in order."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for doc, start, stop in pieces:
        spans.setdefault(doc, []).append((start, stop))
    return {doc: union(spans[doc]) for doc in sorted(spans)}


def loads(problem: Problem, held: Sequence[Sequence[Piece]]) -> Loads:
    """What every rank has to do with its pieces."""
    return Loads(*zip(*(_load(problem, pieces) for pieces in held), strict=True))


def _load(problem: Problem, pieces: Sequence[Piece]) -> tuple[int, int, int, int, float]:
    work, lengths = problem.work, problem.lengths
    pairs = tokens = received = fragments = 0
    keys = 0.0
    for doc, spans in joined(pieces).items():
        length = lengths[doc]
        fragments += len(spans)
        own = sum(stop - start for start, stop in spans)
        tokens += own
        for start, stop in spans:
            found = work.before(length, stop) - work.before(length, start)
            pairs += found
            keys += found / (stop - start)
        if own < length:
            seen = union([*(work.reach(length, a, b) for a, b in spans), *spans])
            received += sum(b - a for a, b in seen) - own
    return pairs, tokens, received, fragments, keys
