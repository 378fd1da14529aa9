"""Whole Trainer runs inside a rank of the pool."""

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
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


class Hosted:
    """What the LightningModule behind a class brings, of whichever package it is."""

    log: Any
    trainer: Any
    automatic_optimization: Any
    optimizers: Any
    manual_backward: Any
    parameters: Any


def pool_trainer(
    rank: int, world: int, strategy: Any, *, package: str = "lightning.pytorch", **options: Any
) -> pl.Trainer:
    """A quiet CPU Trainer over the ranks of the running task.

    Args:
        rank: rank of this process.
        world: number of ranks.
        strategy: name, or instance for Trainers of `package`.
        package: whose Trainer it is; that of `pytorch_lightning` has the same methods.
        options: of the Trainer.
    """
    if package == "pytorch_lightning":
        environments = import_module("lightning_fabric.plugins.environments")
        environments.ClusterEnvironment.register(PoolEnvironment)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    made: pl.Trainer = import_module(package).Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[PoolEnvironment(rank, world)],
        **{**quiet, **options},
    )
    return made


@contextmanager
def workers_allowed() -> Iterator[None]:
    """Let a rank of the pool, which is a daemon, start the workers of loaders.

    The garbage of earlier runs holds process groups. A forked worker that collected it would wait
    forever for threads that it does not have: it is collected before, and the rest left alone.
    """
    gc.collect()
    gc.freeze()
    options: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    before = options.get("daemon")
    options["daemon"] = False
    try:
        yield
    finally:
        options["daemon"] = before
        gc.unfreeze()
