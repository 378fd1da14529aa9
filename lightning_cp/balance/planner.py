"""The choice among plans: within the caps, the one that makes least travel, or takes least time."""

from collections.abc import Iterator
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

FEW = 16
"""Ranks up to which it can pay to cut another document before the longest."""

TIGHTER = (0.6, 0.3)
"""What of the room above the shares is aimed at where the caps were missed."""


@lru_cache(maxsize=256)
def plan(problem: Problem, cost: CostModel | None = None) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of every rank: deterministic, cached by value.

    Every document is held exactly once. Where `problem.feasible`, no rank is over a cap, or the
    excess is the least that was found. Cuts are finer and pieces shorter than asked for only where
    the caps are missed otherwise.

    Args:
        problem: what is balanced.
        cost: chooses by predicted time; None chooses by the keys that are received.
    """
    plans = [_judged(problem, held, cost) for held in _filled(problem)]
    best = min(plans, key=_rank)
    if problem.feasible and (best.excess or best.short):
        plans += [_judged(problem, held, cost) for held in _finer(problem)]
        best = min(plans, key=_rank)
    if problem.feasible and best.excess:
        plans += [_judged(problem, held, cost) for held in _tighter(problem)]
    return tuple(map(tuple, min(plans, key=_rank).held))


class _Plan(NamedTuple):
    """A plan, by how much it is over a cap, its price, and its pieces that are too short."""

    excess: float
    price: float
    short: int
    held: Held


def _rank(plan: _Plan) -> tuple[float, float]:
    return plan.excess, plan.price


def _filled(problem: Problem) -> Iterator[Held]:
    """A plan of every style."""
    for style in STYLES:
        if problem.world <= FEW or style.longest:
            yield fill(problem, style)


def _judged(problem: Problem, held: Held, cost: CostModel | None) -> _Plan:
    found = loads(problem, held)
    least = problem.min_piece
    short = sum(
        piece.stop - piece.start < min(least, problem.lengths[piece.doc])
        for pieces in held
        for piece in pieces
    )
    price = sum(found.received) + least * short if cost is None else cost.step(found)
    return _Plan(problem.excess(found.work, found.tokens), price, short, held)


def _finer(problem: Problem) -> Iterator[Held]:
    """Plans with finer cuts and shorter pieces."""
    for align, least in ((problem.align // 8, problem.min_piece // 4), (1, 1)):
        finer = replace(problem, align=max(1, align), min_piece=max(1, least))
        yield from (fill(finer, style) for style in STYLES[:3])


def _tighter(problem: Problem) -> Iterator[Held]:
    """Plans that aim at less room, so that what they miss is within the real caps."""
    for part in TIGHTER:
        work, tokens = ((cap - 1) * part + 1 for cap in problem.caps)
        less = replace(problem, align=1, min_piece=1, caps=(work, tokens))
        yield from (fill(less, style) for style in STYLES)
