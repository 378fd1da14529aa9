"""What a strategy does with loaders, and with the position in the data in its checkpoints."""

import inspect
import warnings
from typing import Any, ClassVar

from lightning_cp.config import Config
from lightning_cp.data.collate import Share
from lightning_cp.errors import ContextParallelWarning, RefusedError
from lightning_cp.mesh import Mesh
from lightning_cp.plugin.cutting import HOOKS, CutPlace, makes_batches_alone
from lightning_cp.plugin.loaders import (
    RowOrder,
    SharedLoader,
    check_shares,
    makes_rows,
    own_copy,
    place_rows,
    random_state,
    set_random_state,
    watch,
    watched,
)

KEY = "data_position"
"""Where a checkpoint has the position, among the states of the fit loop: others skip it."""

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Loading:
    """Makes loaders alike on peers, and continues an epoch with the very next batch.

    On one rank everything is left to the class behind.
    """

    _config: Config
    _mesh: Mesh | None
    _flavor: ClassVar[Any]
    _place: CutPlace | None
    _position: dict[str, Any] | None = None
    _resumed: int = 0
    _silenced: Any = None

    def _refuse_iterators(self, module: Any) -> None:
        """Steps that fetch batches themselves would get whole ones.

        Raises:
            RefusedError: on every rank, if a step takes a `dataloader_iter`.
        """
        cuts = self._mesh is not None and self._mesh.topology.cp > 1
        for name in STEPS if cuts else ():
            step = getattr(module, name, None)
            if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
                raise RefusedError(
                    f"{type(module).__name__}.{name} takes a dataloader_iter: its batches do not "
                    f"pass through the strategy, which could not cut them; take the batch as the "
                    f"step's argument"
                )

    def _choose_place(self, trainer: Any) -> None:
        """Choose where batches are cut.

        Raises:
            RefusedError: on every rank, if a hook needs whole batches that there will not be.
        """
        if self._mesh is None or self._mesh.topology.cp == 1:
            return
        owners = [x for x in (self.lightning_module, trainer.datamodule) if x is not None]  # type: ignore[attr-defined]
        overridden = self._flavor.is_overridden
        hooks = [hook for hook in HOOKS if any(overridden(hook, owner) for owner in owners)]
        self._place = CutPlace(self._config, hooks)

    def _worker_share(self) -> Share | None:
        """How a loader's collate function cuts; None where its batches stay whole after all."""
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if self._place is None or not (
            self._config.shard_in == "worker" or makes_batches_alone(trainer._active_loop)
        ):
            return None
        share: Share | None = self.share()  # type: ignore[attr-defined]
        return share

    def _row_share(self) -> Share | None:
        """How rows are cut as they are read; None where they are read whole."""
        return None if self._place is None or self._place.whole else self._worker_share()

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader that a stage uses in place of the user's, which is left as it is.

        Raises:
            RefusedError: if its dataset deals out its samples to others than the virtual devices.
        """
        if isinstance(dataloader, SharedLoader):  # that of an earlier run of a CombinedLoader
            dataloader = dataloader.loader
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        mesh, packed = self._mesh, makes_rows(dataloader)
        if mesh is None and not packed:
            return loader
        device = self.data_parallel_rank  # type: ignore[attr-defined]
        check_shares(loader, device, self.data_parallel_size)  # type: ignore[attr-defined]
        loader = own_copy(loader, worker_rank=device, seed_worker=self._flavor.seed_worker)
        if packed:
            place_rows(loader, self, self._row_share)
        if self._place is not None:
            loader = self._place.take(loader, self._worker_share)
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if trainer.training:
            self._prepare_training(trainer, loader)
        if mesh is None:
            return loader
        place = mesh.coordinates
        if self._config.data == "broadcast" and mesh.topology.cp * mesh.topology.tp > 1:
            first = place.cp == place.tp == 0
            return SharedLoader(loader, first=first, group=mesh.device)
        return loader

    def _prepare_training(self, trainer: Any, loader: Any) -> None:
        """Let a training loader remember its position, or take up that of a checkpoint."""
        batches, position = watch(loader), self._position
        if isinstance(batches, RowOrder):
            batches.set_epoch(trainer.current_epoch)  # workers begin before the Trainer says so
        if position is None:
            return
        number, self._resumed = self._resumed, self._resumed + 1
        entry = position["loaders"][number] if number < len(position["loaders"]) else None
        if number == 0 and not position["taken"]:
            set_random_state(position["random"])
        for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(position["epoch"])  # workers ask for indices at once
        rows = entry is not None and "rows" in entry
        if batches is not None and entry is not None and rows == isinstance(batches, RowOrder):
            batches.resume(entry)

    def on_train_start(self) -> None:
        """Continue with the random numbers of the checkpoint, where an epoch is continued."""
        super().on_train_start()  # type: ignore[misc]
        position, self._position, self._resumed = self._position, None, 0
        if position is not None and position["taken"]:
            set_random_state(position["random"])

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint with the position in the training data."""
        loops = checkpoint.get("loops") or {}
        position = self._current_position() if "fit_loop" in loops else None
        if position is not None:
            loops["fit_loop"]["state_dict"][KEY] = position
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and remember its position in the training data."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        fit_loop = (checkpoint.get("loops") or {}).get("fit_loop") or {}
        position = (fit_loop.get("state_dict") or {}).get(KEY)
        rows = position is not None and any(
            "rows" in entry for entry in position["loaders"] if entry
        )
        if position is not None and (rows or self._mesh is not None):
            self._take_up(position, self.data_parallel_size)  # type: ignore[attr-defined]
        return checkpoint

    def _take_up(self, position: dict[str, Any], devices: int) -> None:
        if position["taken"] and position["devices"] != devices:
            warnings.warn(
                f"the checkpoint was saved in the middle of an epoch on "
                f"data_parallel_size={position['devices']} and is loaded on {devices}: its batches "
                f"held other samples, so the loader starts the epoch anew; use the same "
                f"data_parallel_size, or a checkpoint of the end of an epoch",
                ContextParallelWarning,
                stacklevel=2,
            )
            return
        self._position, self._resumed = position, 0
        exact = position["taken"] and None not in position["loaders"]
        if exact and self._silenced is None:
            warnings.filterwarnings("ignore", message=NOT_RESUMABLE)
            self._silenced = warnings.filters[0]

    def teardown(self) -> None:
        """End of a run: nothing is resumed, and Lightning may warn again."""
        self._position, self._resumed = None, 0
        if self._silenced in warnings.filters:
            warnings.filters.remove(self._silenced)  # type: ignore[attr-defined]
        self._silenced = None
        super().teardown()  # type: ignore[misc]

    def _current_position(self) -> dict[str, Any] | None:
        """Where the training loaders are; None where nothing is trained.

        On one rank only packed rows have a position.
        """
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        loop = trainer.fit_loop
        combined = loop._combined_loader
        if combined is None:
            return None
        found = [watched(loader) for loader in combined.flattened]
        if self._mesh is None and not any(isinstance(x, RowOrder) for x in found):
            return None
        progress = loop.epoch_loop.batch_progress
        taken, started = progress.current.processed, loop.epoch_progress.current.started
        between = progress.current.ready == taken  # else a batch has been read and not processed
        ended = taken >= trainer.num_training_batches or (progress.is_last_batch and between)
        taken = 0 if ended else taken
        cycles = combined._mode == "max_size_cycle" and len(found) > 1
        return {
            "devices": self.data_parallel_size,  # type: ignore[attr-defined]
            "epoch": started if ended else max(started - 1, 0),
            "taken": taken,
            "loaders": [x and x.position(taken, cycles=cycles) for x in found],
            "random": random_state(),
        }
