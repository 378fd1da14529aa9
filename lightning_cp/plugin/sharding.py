"""What a strategy does otherwise where parameters are sharded: setup, backward, checkpoints."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_cp import fsdp
from lightning_cp.compat import before_backward
from lightning_cp.config import Config
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import Mesh, parameter_mesh
from lightning_cp.plugin import folder

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
FOREIGN = (
    "FSDPPrecision",
    "DeepSpeedPrecision",
    "BitsandbytesPrecision",
    "TransformerEnginePrecision",
)
"""Precision plugins that are for another strategy, or replace parameters by their own."""

AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")
"""Callbacks that copy the module, which a sharded one refuses."""


class ShardedParameters(Host):
    """Shards parameters, gradients and the state of optimizers over all ranks: `zero_stage=3`.

    With `zero_stage=0`, and on one rank, everything is left to the class behind.
    """

    _config: Config
    _mesh: Mesh | None
    _timeout: Any
    _wrap: fsdp.WrapPolicy | None
    _policy: MixedPrecisionPolicy | None
    _distributed_checkpoint: bool
    _find_unused: bool

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded into parameters that are sharded already."""
        return self._shards

    @property
    def _shards(self) -> bool:
        """Whether this run shards parameters."""
        return self._config.zero_stage == 3 and self._mesh is not None

    @property
    def _sharded(self) -> bool:
        """Whether parameters are sharded; they stay so when a run has ended."""
        return self.lightning_module is not None and fsdp.is_sharded(self.lightning_module)

    def _check_options(self) -> None:
        """Refuse options that would do nothing."""
        if self._find_unused and self._config.zero_stage == 3:
            raise ConfigError(
                "find_unused_parameters=True is about zero_stage=0; with zero_stage=3 a backward "
                "may leave parameters out, so leave the option out"
            )
        given = {
            "auto_wrap_policy": self._wrap is not None,
            "mp_policy": self._policy is not None,
            "save_distributed_checkpoint": self._distributed_checkpoint,
        }
        for name in [name for name, is_given in given.items() if is_given]:
            if self._config.zero_stage == 0:
                raise ConfigError(
                    f"{name} is about sharded parameters, and with zero_stage=0 every rank holds "
                    f"all of them; use zero_stage=3, or leave {name} out"
                )

    def _shard_parameters(self, trainer: Any) -> None:
        """Shard the module, once; nothing is left of gathered parameters when this returns.

        Raises:
            ConfigError: on every rank alike, if this torch, a precision, a callback or the module
                cannot be used with sharded parameters.
        """
        module = self.lightning_module
        if self._mesh is None or module is None:
            return
        fsdp.check_version()
        policy = policy_of(self.precision_plugin, self._policy)
        _refuse_copies(trainer.callbacks)
        for name in ("validate_loop", "test_loop", "predict_loop"):
            # Memory of a gathered parameter that was made in inference mode cannot be trained.
            getattr(trainer, name).inference_mode = False
        topology = self._mesh.topology
        steps = [name for name in STEPS if callable(getattr(module, name, None))]
        if fsdp.is_sharded(module):
            fsdp.check_sharded(module, world=topology.world)
            fsdp.complete(module, steps)
            return
        mesh = parameter_mesh(topology, device=self.root_device, timeout=self._timeout)
        fsdp.shard(module, mesh, wrap=self._wrap, policy=policy, steps=steps)
        if not module.automatic_optimization:
            fsdp.gather_by_hand(module)

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
                    f"zero_stage=3: {lost} parameters of {type(optimizer).__name__} are not (or no "
                    f"longer) parameters of the module, so nothing would be trained; sharding "
                    f"replaces parameters: make the optimizer in configure_optimizers, not before, "
                    f"from self.parameters()"
                )

    @contextmanager
    def _whole_gradients(self) -> Generator[None, None, None]:
        """Backwards inside add up no gradients between ranks."""
        if self.lightning_module is None:
            yield
            return
        with fsdp.without_sync(self.lightning_module):
            yield

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
        if not self._sharded:
            super().teardown()
            return
        module: Any = self.lightning_module
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


def policy_of(plugin: Any, given: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """Dtypes of gathered parameters and reduced gradients for the Trainer's precision.

    Args:
        plugin: the precision plugin.
        given: the user's own policy, which wins.

    Returns:
        For parameters in half precision ("bf16-true", "16-true") one that averages gradients in
        float32; else one that changes nothing, so that autocast sees what it sees on one device.

    Raises:
        ConfigError: if the plugin is for another strategy.
    """
    names = [kind.__name__ for kind in type(plugin).__mro__]
    foreign = [name for name in names if name in FOREIGN]
    if foreign:
        raise ConfigError(
            f"zero_stage=3: the precision plugin {foreign[0]} is for another strategy; use "
            f"Trainer(precision='bf16-mixed') or another precision by its name, and mp_policy for "
            f"the dtypes of communication"
        )
    if given is not None:
        return given
    half = "HalfPrecision" in names
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def _refuse_copies(callbacks: list[Any]) -> None:
    for callback in callbacks:
        names = {kind.__name__ for kind in type(callback).__mro__}
        if names & set(AVERAGING):
            raise ConfigError(
                f"zero_stage=3: {type(callback).__name__} keeps a copy of the module from before "
                f"it is sharded; use zero_stage=0, or average checkpoints"
            )


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [x for group in optimizer.param_groups for x in group["params"]]
