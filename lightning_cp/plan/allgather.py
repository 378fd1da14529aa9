"""All-gather exchange: every rank receives every shard in one round."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import Demand, check_options
from lightning_cp.spans import Spans


@dataclass(frozen=True)
class AllGather:
    """One round in which all other shards arrive, in one buffer in global order.

    Few, large tiles and one wait, at the price of a buffer of the whole sequence. While one group
    of heads is computed the next one is gathered.

    Args:
        head_chunks: heads travel in so many groups, which divides the size of the buffers.
        half_grads: gradients of keys and values travel in the dtype of the keys, which in half
            precision is half of the bytes; they are rounded once more for each rank that reads a
            key.

    Raises:
        ConfigError: if `head_chunks` is no positive integer, or `half_grads` no bool.
    """

    head_chunks: int = 4
    half_grads: bool = False
    name: ClassVar[str] = "allgather"
    relay: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self.head_chunks, self.half_grads)

    def block(self, world: int) -> int:
        """Ranks do not swap heads."""
        return 1

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """Every distance in one round."""
        return (tuple(range(1, demand.world)),) if demand.world > 1 else ()

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """The whole shard."""
        return demand.owned[owner]
