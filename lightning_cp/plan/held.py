"""No exchange: every rank holds all keys."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import Demand
from lightning_cp.spans import Spans


@dataclass(frozen=True)
class Held:
    """Nothing travels; a rank computes what its queries see of the keys that it holds."""

    name: ClassVar[str] = "held"
    relay: ClassVar[bool] = False
    head_chunks: ClassVar[int] = 1
    half_grads: ClassVar[bool] = False

    def block(self, world: int) -> int:
        """No ranks swap heads for tokens."""
        return 1

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """Nothing."""
        return ()
