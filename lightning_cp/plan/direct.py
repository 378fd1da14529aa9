"""Direct exchange: every rank receives exactly what its queries see, from who holds it."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import Demand, check_options
from lightning_cp.spans import Spans


@dataclass(frozen=True)
class Direct:
    """In a round a rank reads what it needs of one or several peers, in one buffer.

    Peers share a round as long as no rank receives more in it than the largest shard, or than the
    most that it wants of one peer: few messages and large tiles where little is needed, and
    buffers of the size of a shard everywhere.

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
    name: ClassVar[str] = "direct"
    relay: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self.head_chunks, self.half_grads)

    def block(self, world: int) -> int:
        """Ranks do not swap heads."""
        return 1

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """Distances in order, gathered while the buffer stays within its bound."""
        bound = max((sum(b - a for a, b in spans) for spans in demand.owned), default=0)
        found: list[tuple[int, ...]] = []
        for distance in range(1, demand.world):
            size = demand.most((distance,))
            if size == 0:
                continue
            if found and demand.most((*found[-1], distance)) <= max(bound, size):
                found[-1] = (*found[-1], distance)
            else:
                found.append((distance,))
        return tuple(found)

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """What `reader` sees of the shard."""
        return demand.wanted(owner, reader)
