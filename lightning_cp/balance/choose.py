"""The layout of a row that is predicted to take least time."""

from functools import lru_cache

from lightning_cp.balance.cost import CostModel
from lightning_cp.balance.layouts import layout_of, pieces_of
from lightning_cp.balance.problem import Problem, loads
from lightning_cp.balance.work import Work

NEARLY = 0.98
"""A layout has to take at most this part of the time of one that comes before it."""


@lru_cache(maxsize=256)
def fastest(
    names: tuple[str, ...], lengths: tuple[int, ...], world: int, work: Work, cost: CostModel
) -> str:
    """Which of some layouts lets the slowest rank of a step be done first; cached by value.

    A pure function, so that every rank finds the same.

    Args:
        names: of layouts, the first one preferred where times are nearly the same.
        lengths: tokens of every document, in the order of the row.
        world: number of ranks.
        work: what the mask costs.
        cost: predicts the times; messages travel while tiles are computed.
    """
    problem = Problem(lengths, work, (1 / world,) * world, (1.0, 1.0))

    def seconds(name: str) -> float:
        layout = layout_of(name, lengths, world, work=work)
        return cost.step(loads(problem, pieces_of(layout, lengths)))

    best, least = names[0], seconds(names[0])
    for name in names[1:]:
        time = seconds(name)
        if time <= NEARLY * least:
            best, least = name, time
    return best
