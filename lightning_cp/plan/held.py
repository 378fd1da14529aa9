"""No exchange: every rank holds all keys."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_cp.plan.schedule import NoRounds


@dataclass(frozen=True)
class Held(NoRounds):
    """Nothing travels; a rank computes what its queries see of the keys that it holds."""

    name: ClassVar[str] = "held"
    relay: ClassVar[bool] = False
    head_chunks: ClassVar[int] = 1
    half_grads: ClassVar[bool] = False

    def block(self, world: int) -> int:
        """No ranks swap heads for tokens."""
        return 1
