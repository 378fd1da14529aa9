"""From layouts, a mask and an exchange to the plan of one rank."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan.allgather import AllGather
from lightning_cp.plan.base import Plan
from lightning_cp.plan.direct import Direct
from lightning_cp.plan.hybrid import Hybrid
from lightning_cp.plan.replicated import Replicated
from lightning_cp.plan.ring import Ring
from lightning_cp.plan.rounds import Round, Tile, Transfer
from lightning_cp.plan.schedule import Demand, Schedule
from lightning_cp.plan.switch import blocks, switch_of
from lightning_cp.plan.tiles import cut, needed
from lightning_cp.plan.ulysses import Ulysses
from lightning_cp.spans import Piece, pieces, rows, total, union

Distances = tuple[int, ...]
"""How many places before a rank the ranks are whose keys it reads in a round."""

Exchange = AllGather | Direct | Hybrid | Replicated | Ring | Ulysses
"""An exchange with options."""

SCHEDULES: dict[str, type[AllGather] | type[Direct] | type[Hybrid] | type[Ring] | type[Ulysses]] = {
    "allgather": AllGather,
    "direct": Direct,
    "hybrid": Hybrid,
    "ring": Ring,
    "ulysses": Ulysses,
}


class PlanKey(NamedTuple):
    """What a plan is found by: the arguments of `build_plan`, compared by value."""

    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    rank: int
    exchange: str | Schedule

    def build(self) -> Plan:
        """The plan; see `build_plan`."""
        return build_plan(
            self.q_layout, self.kv_layout, self.mask, rank=self.rank, exchange=self.exchange
        )


@lru_cache(maxsize=1024)
def build_plan(
    q_layout: Layout,
    kv_layout: Layout,
    mask: Mask,
    *,
    rank: int,
    exchange: str | Schedule,
) -> Plan:
    """Plan of `rank`, cached by value.

    Args:
        q_layout: who holds which queries; positions at or past `mask.q_length` are dummies.
        kv_layout: who holds which keys and values.
        mask: who sees whom.
        rank: rank within the context-parallel group.
        exchange: a name of `SCHEDULES`, or one of them with options.

    Returns:
        A plan whose tiles cover each pair that a query of `rank` sees exactly once. Where blocks
        of ranks swap heads for tokens, they cover what the queries of the rank's block see.

    Raises:
        ConfigError: if the exchange or the rank is unknown, the layouts have different numbers of
            ranks, a layout is shorter than the mask, or blocks do not make up the group.
    """
    if isinstance(exchange, str) and exchange not in SCHEDULES:
        raise ConfigError(f"exchange {exchange!r} is unknown; use one of {sorted(SCHEDULES)}")
    if not 0 <= rank < q_layout.world:
        raise ConfigError(f"rank {rank} is none of the {q_layout.world} ranks of the layout")
    if q_layout.world != kv_layout.world:
        raise ConfigError(
            f"queries are laid out on {q_layout.world} ranks and keys on {kv_layout.world}; "
            f"both must be the context-parallel group"
        )
    if q_layout.length < mask.q_length or kv_layout.length < mask.kv_length:
        raise ConfigError(
            f"the mask is for {mask.q_length} queries and {mask.kv_length} keys, the layouts hold "
            f"only {q_layout.length} and {kv_layout.length}; make the layouts at least as long"
        )
    schedule = schedule_of(exchange)
    size = schedule.block(q_layout.world)
    if size == 1:
        return _Builder(q_layout, kv_layout, mask, rank, schedule).plan()
    return _swapped(q_layout, kv_layout, mask, rank, schedule)


def _swapped(
    q_layout: Layout, kv_layout: Layout, mask: Mask, rank: int, schedule: Schedule
) -> Plan:
    """The plan of a rank's block, and how the rank gets the tokens of the block."""
    size = schedule.block(q_layout.world)
    block, index = divmod(rank, size)
    of_block = _Builder(
        blocks(q_layout, size), blocks(kv_layout, size), mask, block, schedule
    ).plan()
    replicated = isinstance(schedule, Replicated)
    return replace(
        of_block,
        rank=rank,
        world=q_layout.world,
        q_size=q_layout.size(rank),
        kv_size=kv_layout.size(rank),
        rounds=tuple(_between(step, size, index) for step in of_block.rounds),
        switch=switch_of(q_layout, kv_layout, rank=rank, size=size, replicated=replicated),
    )


def schedule_of(exchange: str | Schedule) -> Schedule:
    """The schedule of a name; one with options as it is."""
    return SCHEDULES[exchange]() if isinstance(exchange, str) else exchange


def demand_of(q_layout: Layout, kv_layout: Layout, mask: Mask) -> Demand:
    """What every rank holds and sees, whatever the batch row."""
    rects = [mask.rects(row) for row in mask.rows]
    return Demand(
        owned=[union(spans) for spans in kv_layout.spans],
        needs=[
            union(span for own in rects for span in needed(own, q_layout.pieces(peer)))
            for peer in range(q_layout.world)
        ],
    )


class _Builder:
    """The facts that every round of one plan needs."""

    def __init__(
        self, q_layout: Layout, kv_layout: Layout, mask: Mask, rank: int, schedule: Schedule
    ) -> None:
        self.rank, self.world, self.schedule = rank, q_layout.world, schedule
        self.kv_size, self.q_size = kv_layout.size(rank), q_layout.size(rank)
        self.q_pieces, self.own = q_layout.pieces(rank), kv_layout.pieces(rank)
        self.held = q_layout.spans[rank], kv_layout.spans[rank]
        self.rects = {row: mask.rects(row) for row in mask.rows}
        self.demand = demand_of(q_layout, kv_layout, mask)

    def plan(self) -> Plan:
        rounds = [Round(self.kv_size, tiles=self._tiles(self.own), keys=self.held[1])]
        before = self.own
        for step, distances in enumerate(self.schedule.rounds(self.demand), 1):
            buffer = self._buffer(distances)
            rounds.append(self._round(step, distances, buffer, before))
            before = buffer
        return Plan(
            self.rank,
            self.world,
            self.schedule.name,
            self.q_size,
            self.kv_size,
            tuple(rounds),
            self.schedule.head_chunks,
            self.held[0],
            self.schedule.half_grads,
        )

    def _buffer(self, distances: Distances) -> tuple[Piece, ...]:
        """Rows of the buffer of a round: what arrives, in global order."""
        owners = [(self.rank - distance) % self.world for distance in distances]
        carried = (self.schedule.carried(owner, self.rank, self.demand) for owner in owners)
        return pieces(union(span for spans in carried for span in spans))

    def _round(
        self,
        step: int,
        distances: Distances,
        buffer: tuple[Piece, ...],
        before: tuple[Piece, ...],
    ) -> Round:
        relay = self.schedule.relay and step > 1
        return Round(
            total((piece.start, piece.stop) for piece in buffer),
            relay,
            sends=_nonempty(self._sends(distances, before if relay else self.own)),
            receives=_nonempty(self._receives(distances, buffer)),
            tiles=self._tiles(buffer),
            returns=_nonempty(
                Transfer(owner, rows(buffer, self.demand.wanted(owner, self.rank)))
                for owner in ((self.rank - distance) % self.world for distance in distances)
            ),
            collects=_nonempty(
                Transfer(reader, rows(self.own, self.demand.wanted(self.rank, reader)))
                for reader in ((self.rank + distance) % self.world for distance in distances)
            ),
            keys=tuple((piece.start, piece.stop) for piece in buffer),
        )

    def _sends(self, distances: Distances, source: tuple[Piece, ...]) -> Iterator[Transfer]:
        for distance in distances:
            hops = 1 if self.schedule.relay else distance
            reader = (self.rank + hops) % self.world
            owner = (reader - distance) % self.world
            spans = self.schedule.carried(owner, reader, self.demand)
            yield Transfer(reader, rows(source, spans))

    def _receives(self, distances: Distances, buffer: tuple[Piece, ...]) -> Iterator[Transfer]:
        for distance in distances:
            owner = (self.rank - distance) % self.world
            sender = (self.rank - 1) % self.world if self.schedule.relay else owner
            spans = self.schedule.carried(owner, self.rank, self.demand)
            yield Transfer(sender, rows(buffer, spans))

    def _tiles(self, buffer: tuple[Piece, ...]) -> tuple[Tile, ...]:
        return tuple(
            tile
            for row, rects in self.rects.items()
            for tile in cut(rects, self.q_pieces, buffer, row)
        )


def _nonempty(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Zero-byte messages are never sent."""
    return tuple(transfer for transfer in transfers if transfer.rows)


def _between(step: Round, size: int, index: int) -> Round:
    """A round between blocks of `size` ranks as one between their members at place `index`."""

    def members(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(t._replace(peer=t.peer * size + index) for t in transfers)

    return replace(
        step,
        sends=members(step.sends),
        receives=members(step.receives),
        returns=members(step.returns),
        collects=members(step.collects),
    )
