"""Where batches are cut: by the collate functions of loaders, or after the transfer hooks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_cp.config import Config
from lightning_cp.data.collate import ShardedBatch, Share, WorkerCollate
from lightning_cp.errors import RefusedError

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and data modules that are to see whole batches."""

PLAIN = ("torch", "torchdata")
"""Whose loaders yield what their collate function returns."""


class CutPlace:
    """Chooses for every loader where its batches are cut, and says why.

    Args:
        config: options.
        hooks: the transfer hooks that are overridden.

    Raises:
        RefusedError: if cutting in loaders was asked for and a hook would not see whole batches.
    """

    def __init__(self, config: Config, hooks: Sequence[str]) -> None:
        self._asked = config.shard_in
        names = ", ".join(hooks)
        if hooks and self._asked == "worker":
            raise RefusedError(
                f"shard_in='worker' cuts batches in the collate function of their loader, so "
                f"{names} would see parts of them; use shard_in='auto' or 'main', which cuts after "
                f"these hooks, or do what they do in the dataset or the collate function"
            )
        reasons = {
            "shard_in='main'": self._asked == "main",
            "data='broadcast'": config.data == "broadcast",
            "verify='first_batch'": config.verify == "first_batch",
            f"overridden: {names}": bool(hooks),
        }
        self._reason = next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def whole(self) -> bool:
        """Whether something needs whole batches."""
        return bool(self._reason)

    def take(self, loader: Any, share: Callable[[], Share | None]) -> Any:
        """Let a loader of one's own cut, if this is the place.

        Args:
            loader: may be changed.
            share: says how to cut; see `WorkerCollate`.

        Raises:
            RefusedError: if a loader without a collate function was to cut.
        """
        if self._asked == "worker" and not isinstance(loader, DataLoader):
            raise RefusedError(
                f"shard_in='worker' cuts in the collate function of a DataLoader, but the loader "
                f"is a {type(loader).__name__}; use shard_in='auto' or 'main'"
            )
        if self._asked == "worker" or not (self._reason or _obstacle(loader)):
            loader.collate_fn = WorkerCollate(loader.collate_fn, share)
        return loader

    def words(self, batch: Any, loop: Any) -> str:
        """Where a batch was cut, for people.

        Args:
            batch: as it arrived, before it is cut if that is still to come; the first of its loop.
            loop: the Trainer's, with its `CombinedLoader`.
        """
        if isinstance(batch, ShardedBatch):
            return "by the loader's collate function"
        reason = self._reason
        if not reason and makes_batches_alone(loop):
            reason = _obstacle(loop._combined_loader.flattened[0])
        return f"after the transfer hooks ({reason or 'several loaders make one batch'})"


def makes_batches_alone(loop: Any) -> bool:
    """Whether each batch of a Trainer's loop is that of one loader.

    Args:
        loop: with its `CombinedLoader`; None where none is running.
    """
    combined = getattr(loop, "_combined_loader", None)
    if combined is None:
        return False
    alone: bool = combined._mode == "sequential" or combined.iterables is combined.flattened[0]
    return alone


def _obstacle(loader: Any) -> str:
    """Why a loader cannot cut in its workers, "" if it can."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"{kind.__name__} is no DataLoader"
    if kind.__iter__.__module__.partition(".")[0] not in PLAIN:
        return f"{kind.__name__} has an __iter__ of its own"
    return "" if loader.num_workers else "the loader has no workers"
