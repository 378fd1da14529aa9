"""What the plans of all ranks add up to, without the rounds and tiles of each."""

from functools import lru_cache
from typing import NamedTuple

from lightning_cp.plan.build import PlanKey, demand_of, schedule_of
from lightning_cp.plan.memory import Sizes
from lightning_cp.plan.replicated import Replicated
from lightning_cp.plan.switch import Switch, blocks, switch_of
from lightning_cp.plan.tiles import cut
from lightning_cp.spans import Piece, total


class GroupLoad(NamedTuple):
    """Counts of one attention call of a group, by rank, or by block where ranks swap heads.

    Attributes:
        shared: visible pairs of a head and one batch row, of a mask that all rows share.
        own: visible pairs of a head and all batch rows, of a mask that differs by row.
        received: rows of keys and values that arrive, in a forward and again in its backward.
        returned: rows of their gradients that leave for the rank that holds the keys.
        half_grads: gradients travel in the dtype of the keys.
        switches: how every rank swaps heads for tokens; none where they do not.
    """

    shared: tuple[int, ...]
    own: tuple[int, ...]
    received: tuple[int, ...]
    returned: tuple[int, ...]
    half_grads: bool = False
    switches: tuple[Switch, ...] = ()

    def work(self, sizes: Sizes) -> tuple[int, ...]:
        """Score elements of every rank: `Plan.work` for each of its `own_heads`."""
        pairs = [a * sizes.batch + b for a, b in zip(self.shared, self.own, strict=True)]
        if not self.switches:
            return tuple(sizes.heads * count for count in pairs)
        shares = self.switches[0].shares(sizes.heads, sizes.kv_heads)
        return tuple(share.counts[0] * count for count in pairs for share in shares)

    def bytes(self, sizes: Sizes, *, backward: bool, kept: bool = False) -> int:
        """Bytes that all ranks receive: the sum of what their `Plan.traffic` says.

        Args:
            sizes: of the call.
            backward: of a backward, else of a forward.
            kept: of a backward whose forward kept what heads were swapped for.
        """
        kv_heads = sizes.kv_heads
        if self.switches:
            shares = self.switches[0].shares(sizes.heads, kv_heads)
            kv_heads = sum(share.counts[1] for share in shares)
        row = sizes.batch * kv_heads * (sizes.head_dim + sizes.value_dim)
        wire = sizes.itemsize if self.half_grads else sizes.wire
        grads = wire * sum(self.returned) if backward else 0
        between = row * (sizes.itemsize * sum(self.received) + grads)
        swapped = (self._swapped(switch, sizes, backward, kept) for switch in self.switches)
        return between + sum(swapped)

    def _swapped(self, switch: Switch, sizes: Sizes, backward: bool, kept: bool) -> int:
        own = switch.shares(sizes.heads, sizes.kv_heads)
        rows = switch.rows(sizes, half_grads=self.half_grads)
        again = [] if kept and switch.keeps(sizes.heads, sizes.kv_heads) else [rows.inputs]
        there = [*again, rows.saved] if backward else [rows.inputs]
        back = rows.grads if backward else rows.results
        return sum(switch.crossing(own, row)[1] for row in there) + switch.returning(own, back)[1]


@lru_cache(maxsize=64)
def group_load(key: PlanKey) -> GroupLoad:
    """Counts of every rank, cached by value; much cheaper than the plans of all of them.

    Args:
        key: of the plan of any rank.
    """
    q_layout, kv_layout, mask, _, exchange = key
    schedule, world = schedule_of(exchange), key.q_layout.world
    size, replicated = schedule.block(world), isinstance(schedule, Replicated)
    switches = tuple(
        switch_of(q_layout, kv_layout, rank=rank, size=size, replicated=replicated)
        for rank in range(world)
        if size > 1
    )
    q_layout, kv_layout = blocks(q_layout, size), blocks(kv_layout, size)
    demand = demand_of(q_layout, kv_layout, mask)
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
    return GroupLoad(
        tuple(pairs[True]),
        tuple(pairs[False]),
        tuple(received),
        tuple(returned),
        schedule.half_grads,
        switches,
    )
