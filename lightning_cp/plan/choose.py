"""The layout and the exchange that are predicted to take least time, for every batch anew."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_cp.balance.layouts import pieces_of
from lightning_cp.balance.problem import Problem, loads
from lightning_cp.balance.work import Work
from lightning_cp.layout import Layout
from lightning_cp.plan.build import SCHEDULES, build_plan
from lightning_cp.plan.price import WIDE, Call, cost_of, memory, seconds
from lightning_cp.plan.schedule import Schedule

NEARLY = 0.98
"""What comes later has to take at most this part of the time of what comes before."""

LEAST = 1e-4
"""Seconds of a layer that a choice has to save: below, latencies are not known that well."""

MEMORY = 2.0
"""An exchange may need at most so many times the memory of the first one."""

FEW = 4
"""Ranks up to which all are priced; of more, those with the most to do or to send."""

EXCHANGES = ("direct", *(name for name in SCHEDULES if name != "direct"))
"""What "auto" chooses from, the first one preferred."""

NEVER = float("inf")


class Choice(NamedTuple):
    """What is predicted to take least time.

    Attributes:
        layout: its index among those that were offered.
        exchange: a name, or one with options.
        seconds: of a layer, forward and backward, on the slowest rank.
    """

    layout: int
    exchange: str | Schedule
    seconds: float


def known_calls(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Different calls, the one with most to compute first; the same whatever their order was."""
    return tuple(sorted(set(calls), key=lambda call: (-call.heads * call.head_dim, call)))


@lru_cache(maxsize=256)
def quickest(
    layouts: tuple[Layout, ...],
    exchanges: tuple[str | Schedule, ...],
    lengths: tuple[int, ...],
    work: Work,
    calls: tuple[Call, ...] = (),
) -> Choice:
    """The layout and the exchange with which the slowest rank is done first; cached by value.

    A pure function of what every rank knows, so that all find the same. Exchanges are priced by
    what their plans say of themselves: bytes, messages, pairs, heads and memory.

    Args:
        layouts: of one row, the first one preferred where times are nearly the same.
        exchanges: names of `SCHEDULES`, or some with options; the first one preferred.
        lengths: tokens of every document, in the order of the row.
        work: what the mask costs.
        calls: of the model, see `known_calls`; the first one is priced, and all can be run. Without
            any it is a call of a wide model, and only the first exchange is priced.
    """
    best: Choice | None = None
    for index, layout in enumerate(layouts):
        ranks, most = _busiest(layout, lengths, work), NEVER
        for exchange in exchanges if calls else exchanges[:1]:
            found, peak = _priced(layout, exchange, lengths, work, calls, ranks)
            if found == NEVER or peak > most:
                continue
            most = min(most, MEMORY * peak)
            if best is None or found <= min(NEARLY * best.seconds, best.seconds - LEAST):
                best = Choice(index, exchange, found)
    return best or Choice(0, exchanges[0], NEVER)


def _priced(
    layout: Layout,
    exchange: str | Schedule,
    lengths: tuple[int, ...],
    work: Work,
    calls: tuple[Call, ...],
    ranks: Sequence[int],
) -> tuple[float, int]:
    """Seconds of the slowest of some ranks, and the most bytes that one needs in a call."""
    mask, call = work.mask(lengths), calls[0] if calls else WIDE
    made = build_plan.__wrapped__  # the cache is for plans that are run
    plans = [made(layout, layout, mask, rank=rank, exchange=exchange) for rank in ranks]
    if any(plan.rejects(other.heads) for plan in plans for other in calls):
        return NEVER, 0
    cost = cost_of(call)
    return (
        max(seconds(plan, call, cost) for plan in plans),
        max(max(memory(plan, call)) for plan in plans),
    )


def _busiest(layout: Layout, lengths: tuple[int, ...], work: Work) -> tuple[int, ...]:
    """All of few ranks; of many those with the most tokens, work, and keys that travel."""
    world = layout.world
    if world <= FEW:
        return tuple(range(world))
    problem = Problem(lengths, work, (1 / world,) * world, (1.0, 1.0))
    found = loads(problem, pieces_of(layout, lengths))
    travels = [a + b for a, b in zip(found.received, found.served, strict=True)]
    orders = (layout.sizes, found.work, travels)
    return tuple(sorted({max(range(world), key=lambda r: (of[r], -r)) for of in orders}))
