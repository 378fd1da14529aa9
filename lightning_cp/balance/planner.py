"""The choice among plans: within the caps, one that makes little travel and takes little time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lightning_cp.balance.cost import CostModel
from lightning_cp.balance.fill import Style, fill
from lightning_cp.balance.problem import Held, Piece, Problem, loads

STYLES = (
    Style(0.0, lack=0.5),
    Style(0.0, lack=2.0),
    Style(1.0),
    Style(0.5),
    Style(0.0, longest=False),
    Style(1.0, longest=False),
)
"""Each finds the best plan of some rows."""

ROOMS = (1.0, 1 / 3, 2 / 3)
"""What of the room between even work and its cap a plan uses: even work, or less that travels."""

FEW = 16
"""Ranks up to which it can pay to cut another document before the longest."""

VERY_FEW = 4
"""Ranks up to which all rooms are tried: a plan of many ranks takes longer to make."""

TIGHTER = (0.6, 0.3)
"""What of the room above the shares is aimed at where the caps were missed."""

NEARLY = 1.05
"""Keys of a plan over the fewest of any up to which it is chosen for its time."""


@lru_cache(maxsize=256)
def plan(problem: Problem, cost: CostModel | None = None) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of every rank: deterministic, cached by value.

    Every document is held exactly once. Where `problem.feasible`, no rank is over a cap, or the
    excess is the least that was found. Cuts are finer and pieces shorter than asked for only where
    the caps are missed otherwise.

    Args:
        problem: what is balanced.
        cost: chooses by predicted time of a step. None chooses among the plans with about the
            fewest keys that travel the one whose slowest rank has its attention done first.
    """
    plans = [_judged(problem, held, cost) for held in _filled(problem)]
    best = _best(plans)
    if problem.feasible and (best.excess or best.short):
        plans += [_judged(problem, held, cost) for held in _finer(problem)]
        best = _best(plans)
    if problem.feasible and best.excess:
        plans += [_judged(problem, held, cost) for held in _tighter(problem)]
    return tuple(map(tuple, _best(plans).held))


class _Plan(NamedTuple):
    """A plan.

    Attributes:
        excess: by how much it is over a cap.
        keys: that travel, and more for pieces that are too short; nothing where time alone counts.
        seconds: of the slowest rank, as predicted.
        short: pieces that are too short.
        held: the pieces.
    """

    excess: float
    keys: int
    seconds: float
    short: int
    held: Held


def _best(plans: Sequence[_Plan]) -> _Plan:
    """Least over a cap, then with about the fewest keys, then the quickest."""
    excess = min(plan.excess for plan in plans)
    kept = [plan for plan in plans if plan.excess == excess]
    keys = NEARLY * min(plan.keys for plan in kept)
    return min((plan for plan in kept if plan.keys <= keys), key=lambda plan: plan.seconds)


def _filled(problem: Problem) -> Iterator[Held]:
    """A plan of every style, with more and with less room."""
    for room in ROOMS if problem.world <= VERY_FEW else ROOMS[:2]:
        aimed = replace(problem, caps=_within(problem, (room, 1.0)))
        for style in STYLES:
            if problem.world <= FEW or style.longest:
                yield fill(aimed, style)


def _within(problem: Problem, rooms: tuple[float, float]) -> tuple[float, float]:
    """Caps on work and tokens with parts of the room that the problem's leave above the shares."""
    work, tokens = (1 + (cap - 1) * part for cap, part in zip(problem.caps, rooms, strict=True))
    return work, tokens


def _judged(problem: Problem, held: Held, cost: CostModel | None) -> _Plan:
    found = loads(problem, held)
    least = problem.min_piece
    short = sum(
        piece.stop - piece.start < min(least, problem.lengths[piece.doc])
        for pieces in held
        for piece in pieces
    )
    excess = problem.excess(found.work, found.tokens)
    if cost is not None:
        return _Plan(excess, 0, cost.step(found), short, held)
    keys = sum(found.received) + least * short
    return _Plan(excess, keys, CostModel().attention(found), short, held)


def _finer(problem: Problem) -> Iterator[Held]:
    """Plans with finer cuts and shorter pieces."""
    for align, least in ((problem.align // 8, problem.min_piece // 4), (1, 1)):
        finer = replace(problem, align=max(1, align), min_piece=max(1, least))
        yield from (fill(finer, style) for style in STYLES[:3])


def _tighter(problem: Problem) -> Iterator[Held]:
    """Plans that aim at less room, so that what they miss is within the real caps."""
    for part in TIGHTER:
        caps = _within(problem, (part, part))
        less = replace(problem, align=1, min_piece=1, caps=caps)
        yield from (fill(less, style) for style in STYLES)
