"""Replicated exchange: every rank computes the attention of the whole group, for debugging."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import NoRounds


@dataclass(frozen=True)
class Replicated(NoRounds):
    """Every rank gets all tokens of all heads, computes what one device would, and keeps its own.

    Output and gradients are then the same bits for any number of ranks and any layout: nothing is
    merged, and no sum depends on who holds what. It takes the work and the memory of one device on
    every rank. With it, a difference between two group sizes is not one of attention.
    """

    head_chunks: ClassVar[int] = 1
    half_grads: ClassVar[bool] = False
    name: ClassVar[str] = "replicated"
    relay: ClassVar[bool] = False

    def block(self, world: int) -> int:
        """All ranks."""
        return world
