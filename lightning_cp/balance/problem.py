"""What is to be balanced: a row of documents, the ranks with their caps, and pieces of it."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_cp.balance.work import Work
from lightning_cp.spans import Spans, total, union


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
        align: cuts lie on multiples of this from the first token of a document, where neither a
            cap nor even work needs a finer cut.
        min_piece: least tokens of a piece of a document that is cut.
        works: what the mask costs in every document.
    """

    lengths: tuple[int, ...]
    work: Work
    shares: tuple[float, ...]
    caps: tuple[float, float]
    align: int = 1
    min_piece: int = 1
    works: tuple[Work, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        firsts = [0, *accumulate(self.lengths)][:-1]
        works = tuple(map(self.work.at, firsts, self.lengths))
        object.__setattr__(self, "works", works)

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
        found = zip(self.works, self.lengths, strict=True)
        return sum(work.before(length, length) for work, length in found)

    def rests(self) -> list[Rest]:
        """All documents, sorted by work; empty ones are left out."""
        found = zip(self.works, self.lengths, strict=True)
        return sorted(
            Rest(work.before(n, n), doc, 0, n) for doc, (work, n) in enumerate(found) if n
        )

    def excess(self, work: Sequence[int], tokens: Sequence[int]) -> float:
        """By how much the rank that is worst is over a cap, in shares; 0 where all are within."""
        over = [0.0]
        for whole, loads, cap in (
            (self.pairs, work, self.caps[0]),
            (self.tokens, tokens, self.caps[1]),
        ):
            if whole:
                over += [
                    load / (share * whole) - cap
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
        served: keys that other ranks receive of every rank, counted for each of them; in a
            backward their gradients arrive here.
        fragments: pieces of every rank, neighbours joined.
        keys: keys that a query sees on average, summed over the pieces: the pairs that one more
            query in each piece would add.
    """

    work: tuple[int, ...]
    tokens: tuple[int, ...]
    received: tuple[int, ...]
    served: tuple[int, ...]
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
    spans = [joined(pieces) for pieces in held]
    own = [_load(problem, docs) for docs in spans]
    received, served = _travels(problem, spans)
    work, tokens, fragments, keys = zip(*own, strict=True)
    return Loads(work, tokens, tuple(received), tuple(served), fragments, keys)


def _load(problem: Problem, docs: Mapping[int, Spans]) -> tuple[int, int, int, float]:
    lengths = problem.lengths
    pairs = tokens = fragments = 0
    keys = 0.0
    for doc, spans in docs.items():
        work, length = problem.works[doc], lengths[doc]
        fragments += len(spans)
        tokens += total(spans)
        for start, stop in spans:
            found = work.before(length, stop) - work.before(length, start)
            pairs += found
            keys += found / (stop - start)
    return pairs, tokens, fragments, keys


def _travels(problem: Problem, ranks: Sequence[Mapping[int, Spans]]) -> tuple[list[int], list[int]]:
    """Keys that every rank receives, and that others receive of it."""
    received, served = [0] * len(ranks), [0] * len(ranks)
    holders: dict[int, list[int]] = {}
    for rank, docs in enumerate(ranks):
        for doc in docs:
            holders.setdefault(doc, []).append(rank)
    for doc, found in holders.items():
        if len(found) == 1:
            continue
        length, reach = problem.lengths[doc], problem.works[doc].reach
        seen = [
            union([*(reach(length, a, b) for a, b in ranks[rank][doc]), *ranks[rank][doc]])
            for rank in found
        ]
        readers = _Readers(span for spans in seen for span in spans)
        for rank, spans in zip(found, seen, strict=True):
            own = total(ranks[rank][doc])
            received[rank] += total(spans) - own
            served[rank] += readers.of(ranks[rank][doc]) - own
    return received, served


class _Readers:
    """How many spans hold each position, summed up.

    Args:
        spans: any, which may overlap.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        steps: dict[int, int] = {}
        for start, stop in spans:
            steps[start] = steps.get(start, 0) + 1
            steps[stop] = steps.get(stop, 0) - 1
        self._edges = sorted(steps)
        self._counts = list(accumulate(steps[edge] for edge in self._edges))
        widths = (b - a for a, b in pairwise(self._edges))
        self._sums = [0, *accumulate(n * w for n, w in zip(self._counts, widths, strict=False))]

    def of(self, spans: Spans) -> int:
        """The counts of all positions of some spans; each lies in one that was given."""
        return sum(self._before(stop) - self._before(start) for start, stop in spans)

    def _before(self, at: int) -> int:
        place = bisect_right(self._edges, at) - 1
        return self._sums[place] + self._counts[place] * (at - self._edges[place])
