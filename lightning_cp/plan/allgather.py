"""All-gather exchange: every rank receives every shard in one round."""

from collections.abc import Sequence

from lightning_cp.spans import Spans


class AllGather:
    """One round in which all other shards arrive, in one buffer in global order.

    Few, large tiles and one wait, at the price of a buffer of the whole sequence.
    """

    relay = False

    def rounds(self, world: int) -> int:
        """Rounds after the local one."""
        return min(world - 1, 1)

    def owners(self, rank: int, step: int, world: int) -> tuple[int, ...]:
        """Ranks whose shards `rank` reads in round `step` (from 1)."""
        return tuple(peer for peer in range(world) if peer != rank)

    def source(self, owner: int, rank: int, world: int) -> int:
        """Rank that sends the shard of `owner` to `rank`."""
        return owner

    def carried(
        self, owner: int, step: int, owned: Sequence[Spans], needs: Sequence[Spans]
    ) -> Spans:
        """Global positions of the shard of `owner` that arrive in round `step`."""
        return owned[owner]
