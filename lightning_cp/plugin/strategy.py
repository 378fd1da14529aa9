"""`ContextParallelStrategy` for `lightning.pytorch`."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.overrides.distributed import _sync_module_states, prepare_for_backward
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_cp.compat import forward_sync_buffers
from lightning_cp.config import Config
from lightning_cp.errors import ConfigError
from lightning_cp.plugin.mixin import ContextParallelMixin

T = TypeVar("T")


class ContextParallelStrategy(ContextParallelMixin, ParallelStrategy):
    """Trains on sequences longer than one device can hold, with the user's module unchanged.

    A group of `context_parallel_size` ranks behaves like one bigger device: it reads the same
    samples, every rank holds a part of each sequence, attention and losses see all of it. Losses,
    gradients, checkpoints and the order of data are those of the plain Trainer with
    `data_parallel_size` devices.

    Args:
        context_parallel_size: ranks that share each sequence; "auto" takes all ranks of a node, or
            what `data_parallel_size` leaves over.
        data_parallel_size: number of such groups, each with its own samples; "auto" takes what is
            left over.
        zero_stage: 0, every rank holds all parameters.
        layout: which tokens a rank holds: "zigzag" (even work for causal attention), "contiguous",
            or "auto": zigzag, and contiguous once a step made no causal call.
        exchange: how keys and values travel: "ring" (memory of two shards), "allgather" (memory of
            the whole sequence, fewer and larger tiles), or "auto": ring.
        attention_backend: what computes a tile: "sdpa" (torch's fused kernels), "reference" (plain
            maths, quadratic memory), or "auto": sdpa.
        documents: packed rows: "position_ids" keeps documents apart, which begin wherever the
            batch's position_ids do not continue by 1; "none" lets all tokens of a row attend to
            each other; "auto" does for models of Hugging Face what that version of transformers
            does on one device, and refuses positions that start anew for any other model.
        loss: "auto" expects a loss over the whole sequence, the same on all ranks, which swapped
            losses are; "token_mean" takes what a step returns for a mean over its own tokens
            (`(losses * mask).sum() / mask.sum()`) and averages it by the tokens that count: the
            sum of the batch's loss_mask, else its shift_labels or labels other than -100, else its
            attention_mask, else all. Needs automatic optimization.
        sequence_dims: sequence dimension by field name of the batch (index of a tuple as a string,
            "" for a bare tensor); None for a field that passes through. Well-known names need no
            declaration.
        pad_to_multiple_of: fill rows with dummy tokens up to a multiple of this.
        verify: "first_batch" runs the first training batch (at most 512 tokens of every row) with
            and without context parallelism before anything is trained, prints a table, and stops
            with the name of the first module that differs; "off".
        process_group_backend: backend of the default process group.
        timeout: how long a collective may wait.

    Raises:
        ConfigError: if an option is not allowed; sizes are checked when the number of processes is
            known.
    """

    strategy_name = "context_parallel"

    def __init__(
        self,
        context_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        zero_stage: int = 0,
        layout: Literal["auto", "contiguous", "zigzag"] = "auto",
        exchange: Literal["auto", "allgather", "ring"] = "auto",
        attention_backend: Literal["auto", "reference", "sdpa"] = "auto",
        documents: Literal["auto", "position_ids", "none"] = "auto",
        loss: Literal["auto", "token_mean"] = "auto",
        sequence_dims: dict[str, int | None] | None = None,
        pad_to_multiple_of: int | None = None,
        verify: Literal["off", "first_batch"] = "off",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__()
        if zero_stage != 0:
            raise ConfigError(
                f"zero_stage={zero_stage}: only 0 is supported, every rank holds all parameters"
            )
        self._config = Config(
            layout=layout,
            exchange=exchange,
            attention_backend=attention_backend,
            documents=documents,
            loss=loss,
            sequence_dims=sequence_dims,
            pad_to_multiple_of=pad_to_multiple_of,
            verify=verify,
        )
        self._cp_size, self._dp_size = context_parallel_size, data_parallel_size
        self._process_group_backend, self._timeout = process_group_backend, timeout
        self._forward_redirection = _DDPForwardRedirection()
        self._num_nodes = 1

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank; called by the Trainer."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None and self.num_processes * self.num_nodes > 1:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self._resolve(self.world_size, self.num_processes)
        if self.topology.dp > 1:
            reset_seed()
        if self.world_size > 1:
            self._connect()
            self._start_parallel(device=self.root_device, timeout=self._timeout)

    def _connect(self) -> None:
        if self.cluster_environment is None:
            raise ConfigError("the Trainer gave this strategy no cluster environment")
        device = self.root_device
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend or _get_default_process_group_backend_for_device(device),
            timeout=self._timeout,
            device_id=None if device.type == "cpu" else device,
        )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is None or self.model is None:
            raise RuntimeError("setup() is called by the Trainer, after it connected a module")
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self.model = self._setup_model(self.model)
            self.setup_optimizers(trainer)
        elif self.world_size > 1:
            _sync_module_states(self.model)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Average gradients over every rank: the plain mean is right, see docs on gradients.

        Buffers follow the first virtual device where there are several; within one they are equal.
        """
        if self._mesh is None or not any(p.requires_grad for p in model.parameters()):
            return model
        return DistributedDataParallel(
            model,
            device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
            process_group=self._mesh.grad,
            **forward_sync_buffers(self.topology.dp > 1),
        )

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        module = self.lightning_module
        manual = module is not None and not module.automatic_optimization
        if isinstance(self.model, DistributedDataParallel) and manual:
            prepare_for_backward(self.model, closure_loss)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="Context parallelism: every sequence is shared by a group of ranks",
        )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed(exception)
        self._stop_parallel()

    @override
    def teardown(self) -> None:
        self._stop_parallel()
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel):
            self.model = module
        self._close_groups()
        trainer = module._trainer if module is not None else None
        fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._layer_sync and self.model is not None and fitted:
            self.model = self._layer_sync.revert(self.model)
        super().teardown()
