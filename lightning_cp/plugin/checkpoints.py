"""Checkpoints of a strategy: files and folders that hold no trace of the mesh.

[Note: who waits for whom] All ranks save and load together. What the first rank does alone, it does
within `_first`: the others learn how it ended, so that no rank waits for one that has failed.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lightning_cp import fsdp
from lightning_cp.errors import CheckpointError, ConfigError, ContextParallelWarning
from lightning_cp.plugin import folder
from lightning_cp.plugin.aside import growing, is_local, newest, put
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.parts import Parts
from lightning_cp.plugin.pending import Pending, why


class Checkpoints(Parts):
    """Saves and loads; on one rank as Lightning does.

    A class behind brings `save_checkpoint` and its kin of its Lightning package.
    """

    _flavor: ClassVar[Flavor]
    _checkpoint_class: ClassVar[type[Any]]
    _pending: Pending | None = None
    _writers: Any = None
    _failing: bool = False

    @property
    def checkpoint_io(self) -> Any:
        """What writes and reads files: the user's, else Lightning's, which writes them aside.

        A user's own that wraps Lightning's gets one that writes aside in its place.
        """
        if self._checkpoint_io is None:
            self._checkpoint_io = self._checkpoint_class()
        self._flavor.write_aside(self._checkpoint_io, self._checkpoint_class)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded into parameters that are sharded already."""
        return self._shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the module: whole on the first rank, or this rank's parts for a folder."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        if not self._sharded or self._distributed_checkpoint:
            return state
        for name in list(state):
            state[name] = fsdp.whole(state[name], keep=self.is_global_zero)
        return state if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer: whole on the first rank, or this rank's parts for a folder."""
        if not self._sharded:
            return super().optimizer_state(optimizer)
        module: Any = self.lightning_module
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        fsdp.reshard(module)
        state = optimizer.state_dict()
        if self._distributed_checkpoint:
            return folder.by_name(state, parameters_of(optimizer), module)
        found: dict[str, Any] = fsdp.whole(state, keep=self.is_global_zero)
        return found if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, as one file or as a folder; a collective call of all ranks.

        Raises:
            ConfigError: on every rank alike, if a folder is to be written with `storage_options`,
                or to another machine.
            CheckpointError: on every rank alike, if this one, or the one before that was written
                while training went on, could not be written.
        """
        self._finish_save()
        if not dist.is_initialized():
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self._sharded and self._distributed_checkpoint:
            self._save_folder(checkpoint, self.broadcast(str(filepath)), storage_options)
        else:
            save = super().save_checkpoint
            self._first(lambda: save(checkpoint, filepath, storage_options), filepath)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, a file or a folder; a collective call of all ranks.

        Raises:
            CheckpointError: if a folder cannot be read, or the save before this failed.
        """
        self._finish_save()
        found = newest(Path(checkpoint_path)) if is_local(checkpoint_path) else None
        if found is None or not folder.is_folder(found):
            # Lightning has had this argument since 2.6.
            given = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(checkpoint_path, **given)
        module: Any = self.lightning_module
        fits = module.trainer.state.fn == self._flavor.fitting
        return folder.load(found, module, optimizers=fits, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written in its place is complete."""
        if self._pending is not None and not self._pending.is_complete():
            self._pending.outlived.append(filepath)
        else:
            super().remove_checkpoint(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of every parameter."""
        if not self._sharded:
            super().load_model_state_dict(checkpoint, strict)
            return
        module: Any = self.lightning_module
        own = module.state_dict()
        state = {
            name: fsdp.part_of(value, own[name]) if name in own else value
            for name, value in checkpoint["state_dict"].items()
        }
        module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of every optimizer."""
        if not self._sharded:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            like = dict(zip(numbers, parameters_of(optimizer), strict=False))
            parts = {
                number: {name: fsdp.part_of(value, like[number]) for name, value in entry.items()}
                if number in like
                else entry
                for number, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})

    def on_exception(self, exception: BaseException) -> None:
        """Remember that ranks may be missing."""
        self._failing = True
        super().on_exception(exception)

    def _save_folder(self, checkpoint: dict[str, Any], name: str, storage_options: Any) -> None:
        if storage_options is not None:
            raise ConfigError(
                "save_distributed_checkpoint=True writes a folder itself and takes no "
                "storage_options; leave them out, or use save_distributed_checkpoint=False"
            )
        if not is_local(name):
            raise ConfigError(
                f"save_distributed_checkpoint=True writes folders to file systems that all ranks "
                f"see, and {name} is an address; mount it, or use save_distributed_checkpoint=False"
            )
        path = Path(name)
        parts, rest = folder.divided(checkpoint)

        def begin() -> str:
            place = growing(path)
            folder.write_rest(rest, place)
            return str(place)

        place = Path(self._first(begin, path))
        # No run would wait for a save that goes on after its teardown.
        if self._distributed_checkpoint == "async" and self._mesh is not None:
            self._writers = self._writers or dist.new_group(backend="gloo", timeout=self._timeout)
            written = folder.write_later(parts, place, group=self._writers)
            then = partial(put, path) if self.is_global_zero else None
            self._pending = Pending(written, path, then)
            return
        folder.write(parts, place, path)
        self._first(lambda: put(path), path)

    def _finish_save(self) -> None:
        """Wait for the save that goes on while training does; a collective call of all ranks.

        Raises:
            CheckpointError: on every rank alike, if it failed; only a warning where the run fails.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.error()
        if self._failing:
            if error is not None:
                warnings.warn(_message(pending.path, error), ContextParallelWarning, stacklevel=2)
            return
        self._first(pending.raise_error, pending.path)
        for path in pending.outlived:
            super().remove_checkpoint(path)

    def _end_saves(self) -> None:
        """Wait for what is being written; the run ends."""
        try:
            self._finish_save()
        finally:
            if self._writers is not None:
                dist.destroy_process_group(self._writers)
            self._writers, self._failing = None, False

    def _first(self, action: Callable[[], Any], path: Any) -> Any:
        """What an action returns on the first rank, which alone runs it; see the note above.

        Raises:
            CheckpointError: on every rank alike, if it raised.
        """
        outcome: tuple[Any, str | None] = None, None
        if self.is_global_zero:
            try:
                outcome = action(), None
            except (Exception, CheckpointException) as error:
                text = _message(path, error)
                self.broadcast((None, text))
                raise CheckpointError(text) from error
        found, failure = self.broadcast(outcome)
        if failure is not None:
            raise CheckpointError(failure)
        return found


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """All parameters of an optimizer, in its order."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def _message(path: Any, error: BaseException) -> str:
    return (
        f"the checkpoint {path} was not written: {why(error)}; if there was one of that name "
        f"before, it is still there"
    )
