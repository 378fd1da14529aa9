"""Ring exchange: keys and values travel from neighbour to neighbour, one hop a round."""

from collections.abc import Sequence

from lightning_cp.spans import Spans, intersection, union


class Ring:
    """In round t a rank reads the shard of the rank t places before it.

    A shard shrinks on its way: a hop carries only what the ranks still ahead will read. Gradients
    go straight to their owner: one message instead of a chain, and no rank waits for another's sum.
    Two buffers are alive at a time, whatever the size of the group.
    """

    relay = True

    def rounds(self, world: int) -> int:
        """Rounds after the local one."""
        return world - 1

    def owners(self, rank: int, step: int, world: int) -> tuple[int, ...]:
        """Ranks whose shards `rank` reads in round `step` (from 1)."""
        return ((rank - step) % world,)

    def source(self, owner: int, rank: int, world: int) -> int:
        """Rank that sends the shard of `owner` to `rank`."""
        return (rank - 1) % world

    def carried(
        self, owner: int, step: int, owned: Sequence[Spans], needs: Sequence[Spans]
    ) -> Spans:
        """Global positions of the shard of `owner` that arrive in round `step`."""
        world = len(owned)
        ahead = [span for hop in range(step, world) for span in needs[(owner + hop) % world]]
        return intersection(owned[owner], union(ahead))
