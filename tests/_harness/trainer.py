"""Whole Trainer runs inside a rank of the pool."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import ClusterEnvironment


class PoolEnvironment(ClusterEnvironment):
    """Tells the Trainer that the processes exist already."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    @property
    def creates_processes_externally(self) -> bool:
        """The pool made them."""
        return True

    @property
    def main_address(self) -> str:
        """Unused: the default process group exists."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """Unused."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Never chosen by itself."""
        return False

    def world_size(self) -> int:
        """Ranks of the task."""
        return self._world

    def set_world_size(self, size: int) -> None:
        """Known already."""

    def global_rank(self) -> int:
        """Rank of this process."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Known already."""

    def local_rank(self) -> int:
        """All ranks are on one node."""
        return self._rank

    def node_rank(self) -> int:
        """All ranks are on one node."""
        return 0


def pool_trainer(rank: int, world: int, strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet CPU Trainer over the ranks of the running task."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[PoolEnvironment(rank, world)],
        **{**quiet, **options},
    )
