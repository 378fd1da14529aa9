"""What a strategy does otherwise where parameters are sharded: setup, backward, checkpoints."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_cp import fsdp
from lightning_cp.compat import before_backward
from lightning_cp.errors import ConfigError
from lightning_cp.gradients import clip_grad_norm, clip_grad_value
from lightning_cp.materialize import has_meta
from lightning_cp.plugin import folder
from lightning_cp.plugin.parts import Parts


class ShardedParameters(Parts):
    """What is otherwise in a run whose parameters are sharded.

    With `zero_stage=0`, and on one rank, everything is left to the class behind.
    """

    _accumulating = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded into parameters that are sharded already."""
        return self._shards

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, which must train the sharded parameters.

        Raises:
            ConfigError: on every rank alike, if an optimizer has other parameters.
        """
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if module is None or not self._sharded:
            return
        own = {id(x) for x in module.parameters()}
        for optimizer in self.optimizers:
            lost = sum(id(x) not in own for x in _parameters(optimizer))
            if lost:
                raise ConfigError(
                    f"sharded parameters: {lost} parameters of {type(optimizer).__name__} are not "
                    f"(or no longer) parameters of the module, so nothing would be trained; "
                    f"sharding replaces parameters: make the optimizer in configure_optimizers, "
                    f"not before, from self.parameters()"
                )
            _check_groups(optimizer)

    def setup_precision_plugin(self) -> None:
        """Let gradients be clipped by the norm of all their parts."""
        super().setup_precision_plugin()
        if self._sharded:
            own, plugin = vars(self.precision_plugin), self.precision_plugin

            def by_norm(optimizer: Any, clip_val: float) -> None:
                clip_grad_norm(plugin.main_params(optimizer), clip_val)

            def by_value(optimizer: Any, clip_val: float) -> None:
                clip_grad_value(plugin.main_params(optimizer), clip_val)

            own["clip_grad_by_norm"], own["clip_grad_by_value"] = by_norm, by_value

    @contextmanager
    def _accumulate(self) -> Generator[None, None, None]:
        """Backwards inside do not finish the sums of gradients."""
        if self.lightning_module is None:
            yield
            return
        self._accumulating = True
        try:
            with fsdp.without_sync(self.lightning_module, whole=self._config.whole_gradients):
                yield
        finally:
            self._accumulating = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average what sharding leaves whole, unless more is accumulated first."""
        super().post_backward(closure_loss)
        if self._mesh is not None and self.lightning_module is not None and not self._accumulating:
            fsdp.average_loose(self.lightning_module, group=self._mesh.grad)

    def _see_backward(self, loss: Tensor) -> None:
        """A backward inside a step has to be announced: the step has not returned its loss."""
        if self.lightning_module is not None and self._sharded:
            before_backward(self.lightning_module, loss)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().predict_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step; parameters that are gathered are out of date then."""
        found = super().optimizer_step(optimizer, *args, **kwargs)
        self._reshard()
        return found

    def on_validation_end(self) -> None:
        """Free what a validation gathered."""
        self._reshard()

    def on_test_end(self) -> None:
        """Free what a test gathered."""
        self._reshard()

    def on_predict_end(self) -> None:
        """Free what a prediction gathered."""
        self._reshard()

    def _reshard(self) -> None:
        if self.lightning_module is not None and self._shards:
            fsdp.reshard(self.lightning_module)

    def _broadcast_buffers(self) -> None:
        """Buffers follow the first virtual device where there are several, as with DDP."""
        if self._shards and self._mesh is not None and self._mesh.topology.dp > 1:
            module: Any = self.lightning_module
            fsdp.broadcast(module.buffers(), group=self._mesh.grad)

    def teardown(self) -> None:
        """End a run; sharded parameters stay where they are, on the device of their group."""
        module: Any = self.lightning_module
        if module is None or not (self._sharded or has_meta(module)):
            super().teardown()
            return
        fsdp.reshard(module)
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            if part is not None:
                part.teardown()
        self.checkpoint_io.teardown()

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
            return folder.by_name(state, _parameters(optimizer), module)
        found: dict[str, Any] = fsdp.whole(state, keep=self.is_global_zero)
        return found if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, as one file or as a folder.

        Raises:
            ConfigError: if a folder is to be written with `storage_options`.
        """
        path = Path(self.broadcast(filepath)) if self._sharded else Path(filepath)
        if not (self._sharded and self._distributed_checkpoint):
            if self._sharded and self.is_global_zero and folder.is_folder(path):
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError(
                "save_distributed_checkpoint=True writes a folder itself and takes no "
                "storage_options; leave them out, or use save_distributed_checkpoint=False"
            )
        if self.is_global_zero and path.is_file():
            path.unlink()
        self.barrier()
        folder.save(checkpoint, path, first=self.is_global_zero)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, a file or a folder.

        Raises:
            ConfigError: if it is a folder and parameters are not sharded.
        """
        if "://" in str(checkpoint_path) or not folder.is_folder(Path(checkpoint_path)):
            # Lightning has had this argument since 2.6.
            given = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(checkpoint_path, **given)
        module: Any = self.lightning_module
        if not self._sharded:
            raise ConfigError(
                f"{checkpoint_path} is the folder of a distributed checkpoint, which needs "
                f"zero_stage=3 and two or more ranks; make one file of it with python -m "
                f"lightning.pytorch.utilities.consolidate_checkpoint"
            )
        return folder.load(
            Path(checkpoint_path),
            module,
            optimizers=bool(self.optimizers),
            weights_only=weights_only,
        )

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
            like = dict(zip(numbers, _parameters(optimizer), strict=False))
            parts = {
                number: {name: fsdp.part_of(value, like[number]) for name, value in entry.items()}
                if number in like
                else entry
                for number, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def _check_groups(optimizer: Any) -> None:
    """Kernels over several tensors at once do not take sharded and whole ones together."""
    for group in optimizer.param_groups:
        fast = [name for name in ("foreach", "fused") if group.get(name)]
        scalars = sum(x.ndim == 0 for x in group["params"])
        if fast and 0 < scalars < len(group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}({fast[0]}=True) updates all parameters of a group at "
                f"once, but {scalars} of them have no dimensions and are not sharded as the others "
                f"are; give those a group of their own"
            )
