"""How a strategy cuts the module for its mesh: layers between ranks, then parameters."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_cp import fsdp
from lightning_cp.blocks import WrapPolicy
from lightning_cp.config import Config
from lightning_cp.errors import ConfigError, ContextParallelWarning
from lightning_cp.materialize import check_materials, has_meta, materialize
from lightning_cp.mesh import Mesh, ParameterMesh, parameter_mesh
from lightning_cp.topology import Topology

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

LayerPlan = Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], Any]
"""How layers are shared: styles by the names of modules, or a function that changes the module."""

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


class Parts(Host):
    """Makes the mesh of parameters, and cuts the module for it when it is set up.

    With `zero_stage=0` and layers that no ranks share, and on one rank, nothing is cut.
    """

    _config: Config
    _mesh: Mesh | None
    _timeout: Any
    _wrap: WrapPolicy | None
    _policy: MixedPrecisionPolicy | None
    _offload: bool
    _layer_plan: LayerPlan | None
    _replicate_size: int
    _tp_size: int
    _distributed_checkpoint: bool | Literal["async"]
    _find_unused: bool
    _device_mesh: ParameterMesh | None = None

    @property
    def device_mesh(self) -> ParameterMesh:
        """The mesh that parameters are cut for, as `self.device_mesh` of a module has it.

        Raises:
            RuntimeError: where there is none.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "there is a device mesh once the Trainer has set up the strategy's environment, "
                "with zero_stage=1 to 3, tensor_parallel_size above 1, or a configure_model of the "
                "module; use it in configure_model or later"
            )
        return self._device_mesh

    @property
    def _shards(self) -> bool:
        """Whether this run shards parameters, or the user has."""
        return self._mesh is not None and (self._config.zero_stage > 0 or self._sharded)

    @property
    def _sharded(self) -> bool:
        """Whether parameters are sharded; they stay so when a run has ended."""
        return self.lightning_module is not None and fsdp.is_sharded(self.lightning_module)

    def _check_options(self) -> None:
        """Refuse options that would do nothing."""
        stage = self._config.zero_stage
        if self._distributed_checkpoint not in (True, False, "async"):
            raise ConfigError(
                f"save_distributed_checkpoint={self._distributed_checkpoint!r} is unknown; use "
                f"True, False or 'async'"
            )
        if self._find_unused and stage:
            raise ConfigError(
                f"find_unused_parameters=True is about zero_stage=0; with zero_stage={stage} a "
                f"backward may leave parameters out, so leave the option out"
            )
        given = {
            "auto_wrap_policy": self._wrap is not None,
            "mp_policy": self._policy is not None,
            "cpu_offload": self._offload,
            "param_gather": self._config.param_gather != "auto",
            "save_distributed_checkpoint": bool(self._distributed_checkpoint),
            "data_parallel_replicate_size": self._replicate_size != 1,
        }
        for name in [name for name, is_given in given.items() if is_given]:
            if stage == 0:
                raise ConfigError(
                    f"{name} is about sharded parameters, and with zero_stage=0 every rank holds "
                    f"all of them; use zero_stage=1, 2 or 3, or leave {name} out"
                )

    def _make_device_mesh(self, topology: Topology, *, wanted: bool) -> None:
        """Make the mesh of parameters and show it to the module; a collective call.

        Args:
            topology: sizes of the axes.
            wanted: whether the module has a configure_model that may ask for it.
        """
        if wanted or (topology.world > 1 and (self._config.zero_stage or topology.tp > 1)):
            self._device_mesh = parameter_mesh(
                topology, device=self.root_device, timeout=self._timeout
            )
        if self.lightning_module is not None:
            mesh: Any = self._device_mesh
            self.lightning_module._device_mesh = mesh

    def _prepare_module(self) -> None:
        """Refuse what fits no run with several ranks, before the module is changed.

        Raises:
            ConfigError: on every rank alike.
        """
        refuse_foreign(self.precision_plugin)
        if self._offload and self.root_device.type == "cpu":
            raise ConfigError(
                "cpu_offload=True moves parts from an accelerator to the CPU, and this run is on "
                "the CPU; leave it out"
            )
        module = self.lightning_module
        if module is not None and self._mesh is not None:
            _refuse_finders(module.trainer.callbacks)  # type: ignore[attr-defined]
        if module is None or self._shards:
            return
        if self._mesh is not None and self._mesh.topology.tp > 1:
            raise ConfigError(
                f"tensor_parallel_size={self._mesh.topology.tp} with zero_stage=0: gradients of "
                f"layers that ranks share are averaged by sharded parameters only; use "
                f"zero_stage=1, 2 or 3, or call fully_shard in configure_model"
            )
        if has_meta(module):
            check_materials(module)
            materialize(module, self.root_device, {})

    def _shard_parameters(self, trainer: Any) -> None:
        """Cut the module, once; nothing is left of gathered parameters when this returns.

        Raises:
            ConfigError: on every rank alike, if this torch, a precision, a callback or the module
                cannot be used with sharded parameters.
        """
        module, mesh = self.lightning_module, self._device_mesh
        if self._mesh is None or module is None or mesh is None:
            return
        fsdp.check_version()
        _refuse_copies(trainer.callbacks)
        for name in ("validate_loop", "test_loop", "predict_loop"):
            # Memory of a gathered parameter that was made in inference mode cannot be trained.
            getattr(trainer, name).inference_mode = False
        sharding = fsdp.Sharding(
            stage=self._config.zero_stage,
            wrap=self._wrap,
            policy=policy_of(self.precision_plugin, self._policy),
            offload=self._offload,
        )
        if fsdp.is_sharded(module):
            fsdp.complete_root(module, mesh, sharding)
            fsdp.check_sharded(module, mesh.parameters.mesh.flatten().tolist())
        else:
            self._share_layers(module, mesh["tensor_parallel"])
            convert = self.precision_plugin.convert_module
            fsdp.shard(module, mesh, sharding, device=self.root_device, convert=convert)
        if not module.automatic_optimization:
            fsdp.gather_by_hand(module)
        fsdp.complete(module, [name for name in STEPS if callable(getattr(module, name, None))])
        self._rest_to_device(module)

    def _rest_to_device(self, module: nn.Module) -> None:
        """Bring what has no parameters to the device, as metrics; the parts are where they are."""
        for part in module.modules():
            if not any(True for _ in part.parameters()):
                part.to(self.root_device)

    def _share_layers(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Follow the plan for tensor parallelism.

        Raises:
            ConfigError: on every rank alike, if no layer is shared then.
        """
        if mesh.size() == 1:
            if self._layer_plan is not None:
                warnings.warn(
                    "tensor_parallel_plan has no effect with tensor_parallel_size=1",
                    ContextParallelWarning,
                    stacklevel=2,
                )
            return
        if callable(self._layer_plan):
            self._layer_plan(module, mesh)
        elif self._layer_plan is not None:
            if has_meta(module):
                check_materials(module)
                materialize(module, self.root_device, {})
                self.precision_plugin.convert_module(module)
            parallelize_module(module, mesh, dict(self._layer_plan))
        if not any(isinstance(x, DTensor) for x in module.parameters()):
            raise ConfigError(
                f"tensor_parallel_size={mesh.size()}, but no layer is shared: all ranks of a group "
                f"would compute the same; pass a tensor_parallel_plan that names modules of "
                f"{type(module).__name__}, or call parallelize_module with "
                f"self.device_mesh['tensor_parallel'] in configure_model"
            )


def policy_of(plugin: Any, given: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """Dtypes of gathered parameters and reduced gradients for the Trainer's precision.

    Args:
        plugin: the precision plugin.
        given: the user's own policy, which wins.

    Returns:
        For parameters in half precision ("bf16-true", "16-true") one that averages gradients in
        float32; else one that changes nothing, so that autocast sees what it sees on one device.
    """
    if given is not None:
        return given
    half = "HalfPrecision" in [kind.__name__ for kind in type(plugin).__mro__]
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def refuse_foreign(plugin: Any) -> None:
    """Refuse a precision plugin that is for another strategy.

    Raises:
        ConfigError: on every rank alike.
    """
    foreign = [kind.__name__ for kind in type(plugin).__mro__ if kind.__name__ in FOREIGN]
    if foreign:
        raise ConfigError(
            f"the precision plugin {foreign[0]} is for another strategy; use "
            f"Trainer(precision='bf16-mixed') or another precision by its name, and mp_policy for "
            f"the dtypes of communication of sharded parameters"
        )


def _refuse_finders(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if "BatchSizeFinder" in [kind.__name__ for kind in type(callback).__mro__]:
            raise ConfigError(
                "BatchSizeFinder tries sizes until one rank has no memory left, and the others "
                "would wait for that rank; choose batch_size without it"
            )


def _refuse_copies(callbacks: list[Any]) -> None:
    for callback in callbacks:
        names = {kind.__name__ for kind in type(callback).__mro__}
        if names & set(AVERAGING):
            raise ConfigError(
                f"{type(callback).__name__} keeps a copy of the module from before its parameters "
                f"are sharded; use zero_stage=0, or average checkpoints"
            )
