"""From layouts, a mask and an exchange to the plan of one rank."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan.allgather import AllGather
from lightning_cp.plan.base import Plan, Round, Tile, Transfer
from lightning_cp.plan.ring import Ring
from lightning_cp.plan.tiles import cut, needed
from lightning_cp.spans import Piece, Spans, intersection, pieces, rows, total, union


class Schedule(Protocol):
    """Who sends which shard to whom in which round. Pure functions of ranks and spans."""

    relay: bool

    def rounds(self, world: int) -> int: ...

    def owners(self, rank: int, step: int, world: int) -> tuple[int, ...]: ...

    def source(self, owner: int, rank: int, world: int) -> int: ...

    def carried(
        self, owner: int, step: int, owned: Sequence[Spans], needs: Sequence[Spans]
    ) -> Spans: ...


SCHEDULES: dict[str, Schedule] = {"allgather": AllGather(), "ring": Ring()}


@lru_cache(maxsize=1024)
def build_plan(
    q_layout: Layout, kv_layout: Layout, mask: Mask, *, rank: int, exchange: str
) -> Plan:
    """Plan of `rank`, cached by value.

    Args:
        q_layout: who holds which queries; positions at or past `mask.q_length` are dummies.
        kv_layout: who holds which keys and values.
        mask: who sees whom.
        rank: rank within the context-parallel group.
        exchange: a name of `SCHEDULES`.

    Returns:
        A plan whose tiles cover each pair that a query of `rank` sees exactly once.

    Raises:
        ConfigError: if the exchange or the rank is unknown, the layouts have different numbers of
            ranks, or a layout is shorter than the mask.
    """
    if exchange not in SCHEDULES:
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
    return _Builder(q_layout, kv_layout, mask, rank, SCHEDULES[exchange]).plan(exchange)


class _Builder:
    """The facts that every round of one plan needs."""

    def __init__(
        self, q_layout: Layout, kv_layout: Layout, mask: Mask, rank: int, schedule: Schedule
    ) -> None:
        self.rank, self.world, self.schedule = rank, q_layout.world, schedule
        self.kv_size, self.q_size = kv_layout.size(rank), q_layout.size(rank)
        self.q_pieces, self.own = q_layout.pieces(rank), kv_layout.pieces(rank)
        self.rects = {row: mask.rects(row) for row in mask.rows}
        self.owned = [union(spans) for spans in kv_layout.spans]
        self.needs = [
            union(
                span
                for rects in self.rects.values()
                for span in needed(rects, q_layout.pieces(peer))
            )
            for peer in range(self.world)
        ]

    def plan(self, exchange: str) -> Plan:
        rounds = [Round(self.kv_size, tiles=self._tiles(self.own))]
        before = self.own
        for step in range(1, self.schedule.rounds(self.world) + 1):
            buffer = self._buffer(step)
            rounds.append(self._round(step, buffer, before))
            before = buffer
        return Plan(self.rank, self.world, exchange, self.q_size, self.kv_size, tuple(rounds))

    def _carried(self, owner: int, step: int) -> Spans:
        return self.schedule.carried(owner, step, self.owned, self.needs)

    def _buffer(self, step: int) -> tuple[Piece, ...]:
        """Rows of the buffer of round `step`: what arrives, in global order."""
        owners = self.schedule.owners(self.rank, step, self.world)
        return pieces(union(span for owner in owners for span in self._carried(owner, step)))

    def _round(self, step: int, buffer: tuple[Piece, ...], before: tuple[Piece, ...]) -> Round:
        schedule, rank, world = self.schedule, self.rank, self.world
        relay = schedule.relay and step > 1
        peers = [peer for peer in range(world) if peer != rank]
        sends, collects = [], []
        for peer in peers:
            for owner in schedule.owners(peer, step, world):
                if schedule.source(owner, peer, world) == rank:
                    spans = self._carried(owner, step)
                    sends.append(Transfer(peer, rows(before if relay else self.own, spans)))
                if owner == rank:
                    spans = intersection(self.owned[rank], self.needs[peer])
                    collects.append(Transfer(peer, rows(self.own, spans)))
        receives, returns = [], []
        for owner in schedule.owners(rank, step, world):
            arriving = rows(buffer, self._carried(owner, step))
            receives.append(Transfer(schedule.source(owner, rank, world), arriving))
            spans = intersection(self.owned[owner], self.needs[rank])
            returns.append(Transfer(owner, rows(buffer, spans)))
        return Round(
            total((piece.start, piece.stop) for piece in buffer),
            relay,
            sends=_nonempty(sends),
            receives=_nonempty(receives),
            tiles=self._tiles(buffer),
            returns=_nonempty(returns),
            collects=_nonempty(collects),
        )

    def _tiles(self, buffer: tuple[Piece, ...]) -> tuple[Tile, ...]:
        return tuple(
            tile
            for row, rects in self.rects.items()
            for tile in cut(rects, self.q_pieces, buffer, row)
        )


def _nonempty(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Zero-byte messages are never sent."""
    return tuple(transfer for transfer in transfers if transfer.rows)
