"""What the plans of all ranks add up to, without the rounds and tiles of each."""

from functools import lru_cache
from typing import NamedTuple

from lightning_cp.plan.build import PlanKey, demand_of, schedule_of
from lightning_cp.plan.tiles import cut
from lightning_cp.spans import Piece, total


class GroupLoad(NamedTuple):
    """Counts by rank of one attention call of a group.

    Attributes:
        shared: visible pairs of a head and one batch row, of a mask that all rows share.
        own: visible pairs of a head and all batch rows, of a mask that differs by row.
        received: rows of keys and values that arrive, in a forward and again in its backward.
        returned: rows of their gradients that leave for the rank that holds the keys.
    """

    shared: tuple[int, ...]
    own: tuple[int, ...]
    received: tuple[int, ...]
    returned: tuple[int, ...]

    def work(self, batch: int = 1) -> tuple[int, ...]:
        """`Plan.work` of every rank."""
        return tuple(a * batch + b for a, b in zip(self.shared, self.own, strict=True))

    def bytes(self, *, row: int, itemsize: int, backward: bool) -> int:
        """Bytes that all ranks receive: the sum of what their `Plan.traffic` says.

        Args:
            row: elements of a row of keys and values, of all key heads and batch rows.
            itemsize: bytes of one element. Gradients travel in at least four.
            backward: of a backward, else of a forward.
        """
        grads = max(itemsize, 4) * sum(self.returned) if backward else 0
        return row * (itemsize * sum(self.received) + grads)


@lru_cache(maxsize=64)
def group_load(key: PlanKey) -> GroupLoad:
    """Counts of every rank, cached by value; much cheaper than the plans of all of them.

    Args:
        key: of the plan of any rank.
    """
    q_layout, kv_layout, mask, _, exchange = key
    demand, schedule = demand_of(q_layout, kv_layout, mask), schedule_of(exchange)
    ranks, whole = range(q_layout.world), (Piece(0, kv_layout.length, 0),)
    pairs: dict[bool, list[int]] = {True: [0] * len(ranks), False: [0] * len(ranks)}
    for row in mask.rows:
        rects = mask.rects(row)
        for rank in ranks:
            tiles = cut(rects, q_layout.pieces(rank), whole, row)
            pairs[row is None][rank] += sum(tile.pairs for tile in tiles)
    received, returned = [0] * len(ranks), [0] * len(ranks)
    for distance in (d for distances in schedule.rounds(demand) for d in distances):
        for rank in ranks:
            owner = (rank - distance) % len(ranks)
            received[rank] += total(schedule.carried(owner, rank, demand))
            returned[rank] += total(demand.wanted(owner, rank))
    return GroupLoad(tuple(pairs[True]), tuple(pairs[False]), tuple(received), tuple(returned))
