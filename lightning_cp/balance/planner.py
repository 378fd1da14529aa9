"""The choice among plans: within the caps, the one that makes least travel, or takes least time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from lightning_cp.balance.cost import CostModel
from lightning_cp.balance.fill import Style, fill
from lightning_cp.balance.problem import Piece, Problem, loads

STYLES = (
    Style(1.0, 1.0),
    Style(1.0, 0.0),
    Style(0.5, 0.5),
    Style(1.0, 1.0, longest=False),
    Style(1.0, 0.0, longest=False),
)

LITTLE = 0.004
"""Part of a row that a rank may receive without a search for something better."""

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
    best: tuple[float, float] | None = None
    chosen: list[list[Piece]] = []
    for attempt in _attempts(problem):
        for style in STYLES:
            held = fill(attempt, style)
            found = loads(problem, held)
            received = sum(found.received)
            price = float(received) if cost is None else cost.step(found)
            key = (problem.excess(found.work, found.tokens), price)
            if best is None or key < best:
                best, chosen = key, held
            if cost is None and not key[0] and received <= LITTLE * problem.tokens * problem.world:
                break
        if best is not None and not best[0]:
            break
    return tuple(map(tuple, chosen))


def _attempts(problem: Problem) -> Iterator[Problem]:
    """The problem; with finer cuts; with less room, so that a miss stays within the caps."""
    yield problem
    if not problem.feasible:
        return
    fine = replace(problem, align=1, min_piece=1)
    if fine != problem:
        yield replace(problem, align=max(1, problem.align // 8), min_piece=1)
        yield fine
    for part in TIGHTER:
        work, tokens = ((cap - 1) * part + 1 for cap in problem.caps)
        yield replace(fine, caps=(work, tokens))
