"""Hybrid exchange: neighbours swap heads for tokens, and blocks of neighbours exchange keys."""

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

from lightning_cp.errors import ConfigError
from lightning_cp.plan.direct import Direct
from lightning_cp.plan.ring import Ring
from lightning_cp.plan.schedule import Demand, check_options
from lightning_cp.plan.switch import check_block
from lightning_cp.spans import Spans

OUTER: dict[str, type[Direct] | type[Ring]] = {"direct": Direct, "ring": Ring}


@dataclass(frozen=True)
class Hybrid:
    """Ulysses within blocks of neighbouring ranks, direct or ring between the blocks.

    Neighbours are on one node where the size of a block divides that of a node, so that the swap
    of heads, which moves most, stays inside; between blocks only the keys of a rank's own heads
    travel.

    Args:
        ulysses_size: ranks of a block; divides the group, and there are as many query heads. Where
            None, the greatest divisor of the group that is at most its square root: of a prime
            number of ranks 1, and the outer exchange alone is left.
        outer: what blocks do: "direct" or "ring".
        head_chunks: heads of a rank travel in so many groups, if there are as many key heads.
        half_grads: gradients of keys and values travel in the dtype of the keys, which in half
            precision is half of the bytes.

    Raises:
        ConfigError: if a value is not allowed.
    """

    ulysses_size: int | None = None
    outer: str = "direct"
    head_chunks: int = 2
    half_grads: bool = False
    name: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        check_options(self.head_chunks, self.half_grads)
        size = self.ulysses_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"ulysses_size={size!r} must be a positive integer: how many neighbouring ranks "
                f"swap heads for tokens, or None"
            )
        if self.outer not in OUTER:
            raise ConfigError(f"outer={self.outer!r} is unknown; use one of {sorted(OUTER)}")

    @property
    def relay(self) -> bool:
        """That of the outer exchange."""
        return OUTER[self.outer].relay

    def block(self, world: int) -> int:
        """The size that was asked for, or that nearest to the square root.

        Raises:
            ConfigError: if it does not divide the number of ranks.
        """
        if self.ulysses_size is not None:
            return check_block(self.ulysses_size, world)
        return max(n for n in range(1, isqrt(world) + 1) if world % n == 0)

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """Those of the outer exchange."""
        return OUTER[self.outer]().rounds(demand)

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """What the outer exchange carries."""
        return OUTER[self.outer]().carried(owner, reader, demand)
