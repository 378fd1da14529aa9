"""Ring exchange: keys and values travel from neighbour to neighbour, one hop a round."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import Demand, check_chunks
from lightning_cp.spans import Spans, union


@dataclass(frozen=True)
class Ring:
    """In round t a rank reads the shard of the rank t places before it.

    A shard shrinks on its way: a hop carries only what the ranks still ahead will read. Gradients
    go straight to their owner: one message instead of a chain, and no rank waits for another's sum.
    Two buffers are alive at a time, whatever the size of the group.

    Args:
        head_chunks: heads travel in so many groups, which divides the size of the buffers.

    Raises:
        ConfigError: if `head_chunks` is no positive integer.
    """

    head_chunks: int = 2
    name: ClassVar[str] = "ring"
    relay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_chunks(self.head_chunks)

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """One distance a round."""
        return tuple((distance,) for distance in range(1, demand.world))

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """What `reader` and the ranks behind it on the way see of the shard."""
        world = demand.world
        ahead = range((reader - owner) % world, world)
        return union(span for hop in ahead for span in demand.wanted(owner, (owner + hop) % world))
