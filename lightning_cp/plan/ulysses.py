"""Ulysses exchange: every rank gets all tokens, for a part of the heads."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import NoRounds, check_options


@dataclass(frozen=True)
class Ulysses(NoRounds):
    """Ranks swap heads for tokens, and each computes its heads as one device would.

    Queries travel too, but what a rank moves shrinks with the size of the group. Tiles are as large
    as on one device, and the work is even whatever the layout, as far as heads can be dealt out
    evenly. There are at least as many query heads as ranks; key heads go to every rank that needs
    them.

    Args:
        head_chunks: heads of a rank travel in so many groups, if there are as many key heads:
            while one is computed the next arrives and the results of the one before leave.
        half_grads: gradients of keys that several ranks read travel in the dtype of the keys,
            which in half precision is half of the bytes.

    Raises:
        ConfigError: if `head_chunks` is no positive integer, or `half_grads` no bool.
    """

    head_chunks: int = 2
    half_grads: bool = False
    name: ClassVar[str] = "ulysses"
    relay: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self.head_chunks, self.half_grads)

    def block(self, world: int) -> int:
        """All ranks."""
        return world
