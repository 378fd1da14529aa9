"""Ring exchange: keys and values travel from neighbour to neighbour, one hop a round."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import Demand, check_options
from lightning_cp.spans import Spans, union


@dataclass(frozen=True)
class Ring:
    """In round t a rank reads the shard of the rank t places before it.

    A shard shrinks on its way: a hop carries only what the ranks still ahead will read. Gradients
    go straight to their owner: one message instead of a chain, and no rank waits for another's sum.
    Two buffers are alive at a time, whatever the size of the group.

    Args:
        head_chunks: heads travel in so many groups, which divides the size of the buffers.
        half_grads: gradients of keys and values travel in the dtype of the keys, which in half
            precision is half of the bytes; they are rounded once more for each rank that reads a
            key.

    Raises:
        ConfigError: if `head_chunks` is no positive integer, or `half_grads` no bool.
    """

    head_chunks: int = 2
    half_grads: bool = False
    name: ClassVar[str] = "ring"
    relay: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self.head_chunks, self.half_grads)

    def block(self, world: int) -> int:
        """Ranks do not swap heads."""
        return 1

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """One distance a round."""
        return tuple((distance,) for distance in range(1, demand.world))

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """What `reader` and the ranks behind it on the way see of the shard."""
        world = demand.world
        ahead = range((reader - owner) % world, world)
        return union(span for hop in ahead for span in demand.wanted(owner, (owner + hop) % world))
