"""What a context-parallel strategy does with batches, steps and backwards, for any Trainer.

The mixin knows nothing of the Lightning package it is used with; a strategy class puts it in front
of that package's own base class.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_cp.api import ContextParallel, Shard
from lightning_cp.comm.failure import forget, report
from lightning_cp.comm.gather import gather_objects
from lightning_cp.config import Config
from lightning_cp.context import SLOT, Context, reenter
from lightning_cp.data.collate import ShardedBatch, Share
from lightning_cp.data.content import content_code
from lightning_cp.diagnostics.verify import step_of
from lightning_cp.errors import BatchError, ConfigError, MismatchError, RefusedError
from lightning_cp.mesh import Mesh, build_mesh
from lightning_cp.metrics import GroupMetrics, Groups
from lightning_cp.plugin.cutting import CutPlace
from lightning_cp.plugin.logs import StepLogs
from lightning_cp.plugin.seeds import StepSeeds, base_seed
from lightning_cp.plugin.table import StartTable, attended
from lightning_cp.plugin.writers import MutedWriters
from lightning_cp.topology import Size, Topology
from lightning_cp.verification import verify


class ContextParallelMixin:
    """Cuts batches, activates the context around steps and backwards, and checks the outcome."""

    _config: Config
    _cp_size: Size
    _dp_size: Size
    _replicate_size: int
    _tp_size: int
    _topology: Topology | None = None
    _mesh: Mesh | None = None
    _parallel: ContextParallel | None = None
    _shard: Shard | None = None
    _repeats: tuple[Any, Shard] | None = None
    _context: Context | None = None
    _table: StartTable | None = None
    _logs: StepLogs | None = None
    _seeds: StepSeeds | None = None
    _metrics: GroupMetrics | None = None
    _verified: bool = False
    _muted: MutedWriters | None = None
    _place: CutPlace | None = None
    _policy: MixedPrecisionPolicy | None = None

    @property
    def topology(self) -> Topology:
        """Sizes of the parallel axes.

        Raises:
            RuntimeError: before the strategy has set up its environment.
        """
        if self._topology is None:
            raise RuntimeError(
                "the sizes of the parallel axes are known once the Trainer has set up the "
                "strategy's environment; use this in or after LightningModule.setup()"
            )
        return self._topology

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one virtual device, so that a sampler must be split.

        With one, the Trainer keeps the user's own sampler.
        """
        return self._topology is None or self._topology.dp > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas are virtual devices: all ranks of one read the same samples."""
        rank = self.global_rank  # type: ignore[attr-defined]
        return {"num_replicas": self.topology.dp, "rank": self.topology.coordinates(rank).dp}

    @property
    def data_parallel_size(self) -> int:
        """Number of virtual devices, each with samples of its own."""
        return self.topology.dp

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's virtual device."""
        return self.topology.coordinates(self.global_rank).dp  # type: ignore[attr-defined]

    def share(self, module: torch.nn.Module | None = None) -> Share | None:
        """How this rank cuts, for `ContextParallelCollate`; None without context parallelism.

        Args:
            module: the model, to see whether it takes positions; the Trainer's where not given.

        Raises:
            RuntimeError: before the strategy has set up its environment.
        """
        if self.topology.cp == 1 or self._parallel is None:
            return None
        own = self.lightning_module  # type: ignore[attr-defined]
        return self._parallel.share(module or own)

    def _say(self, message: str) -> None:
        """Tell the user something, on the first rank."""

    def _resolve(self, world: int, local_world: int) -> None:
        """Resolve the sizes, before any rank talks to another."""
        topology = Topology.resolve(
            world=world,
            local_world=local_world,
            cp=self._cp_size,
            dp=self._dp_size,
            dp_replicate=self._replicate_size,
            tp=self._tp_size,
        )
        if topology.cp * topology.tp > local_world:
            warnings.warn(
                f"a context-parallel group of {topology.cp} ranks spans nodes of {local_world}; "
                f"keys and values will travel over the network between nodes",
                stacklevel=2,
            )
        self._topology = topology

    def _start_parallel(self, *, device: torch.device, timeout: Any) -> None:
        """Make the groups and install the swap; the default group exists."""
        forget()
        self._mesh = build_mesh(self.topology, device=device, timeout=timeout)
        if self.topology.cp > 1:
            self._parallel = ContextParallel(
                self._mesh.cp,
                a2a=self._mesh.cp_a2a,
                meta=self._mesh.meta,
                rank=self._mesh.coordinates.cp,
                world=self.topology.cp,
                config=self._config,
                device_type=device.type,
            )
            self._table = self._table or StartTable(self._mesh, self._config)
            self._logs = StepLogs(self._parallel, self._say)
            seed = self.broadcast(base_seed())  # type: ignore[attr-defined]
            self._seeds = StepSeeds(seed, self.data_parallel_rank)

    def _mute_writers(self, callbacks: Iterable[Any]) -> None:
        """Let prediction writers write on the rank that gets whole rows, and nowhere else."""
        gathered = self._parallel is not None and self._config.predict_gather == "rank0_cpu"
        place = self._mesh.coordinates if self._mesh is not None else None
        if gathered and place is not None and (place.cp > 0 or place.tp > 0):
            self._muted = MutedWriters(callbacks)

    def _watch_metrics(self, module: torch.nn.Module | None) -> None:
        """Let the module's metrics count tokens and rows as one device would."""
        if module is not None and self._mesh is not None and self._parallel is not None:
            groups = Groups(
                cp=self._mesh.cp,
                dp=self._mesh.dp,
                meta=self._mesh.meta,
                rank=self._parallel.rank,
                world=self._parallel.world,
                devices=self.topology.dp,
            )
            self._metrics = GroupMetrics(module, groups)

    def _stop_parallel(self) -> None:
        """Put attention, losses and callbacks back."""
        if self._muted is not None:
            self._muted.restore()
        self._muted = None
        if self._parallel is not None:
            self._parallel.close()
        if self._metrics is not None:
            self._metrics.remove()
        self._parallel, self._logs, self._seeds, self._metrics = None, None, None, None
        self._place = None
        self._shard, self._repeats, self._context = None, None, None

    def _close_groups(self) -> None:
        """Give the groups back; nothing uses them any more."""
        if self._mesh is not None:
            SLOT.forget(self._mesh.cp)
            self._mesh.close()
        self._mesh = None

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move the whole batch, run the user's transfer hooks on it, and keep this rank's part."""
        code = _code(batch) if self._mesh is not None else None
        self._compare_samples(code)
        if self._parallel is None:
            return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        whole = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        module = self.lightning_module  # type: ignore[attr-defined]
        self._verify(whole)
        if isinstance(whole, ShardedBatch):  # the Trainer does not look inside
            whole = whole.mapped(self.precision_plugin.convert_input)  # type: ignore[attr-defined]
        try:
            self._shard = self._parallel.shard(whole, module=module, stage=self._stage(), code=code)
        except BaseException as error:
            report(error)
            raise
        if self._table is not None and self._place is not None:
            place = self._place.words(whole, module.trainer._active_loop)
            self._table.show(self._shard, place, self._attended(module))
        return self._shard.batch

    def _compare_samples(self, code: int | None) -> None:
        """See that the ranks that share a layer got the same batch, or the same part of one.

        Raises:
            MismatchError: on every rank of the virtual device, if they did not.
        """
        if self._mesh is None or self._mesh.topology.tp == 1:
            return
        size = self._mesh.topology.tp
        codes = gather_objects((self._mesh.rank, code), group=self._mesh.device)
        for number, (rank, found) in enumerate(codes):
            first, expected = codes[number - number % size]
            if found != expected:
                error = MismatchError(
                    f"ranks {first} and {rank} share layers (tensor_parallel_size={size}), but "
                    f"their batches differ; give both the same samples in the same order, or use "
                    f"data='broadcast'"
                )
                self._failed(error)
                raise error

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on this rank's part; its loss remembers the context for the backward."""
        return self._step(super().training_step, args, kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on this rank's part."""
        return self._step(super().validation_step, args, kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on this rank's part."""
        return self._step(super().test_step, args, kwargs)  # type: ignore[misc]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on this rank's part; what it returns is put together again.

        Whole rows in their original order are returned where `predict_gather` says, None elsewhere.
        """
        return self._step(super().predict_step, args, kwargs, predicts=True)  # type: ignore[misc]

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Backward under the context of its forward, so that recomputation repeats it."""
        try:
            with self._active():
                loss: Tensor = super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._failed(error)
            raise
        return loss

    def _attended(self, module: torch.nn.Module) -> Tensor:
        plugin, device = self.precision_plugin, self.root_device  # type: ignore[attr-defined]
        return attended(module, plugin, self._policy, device)

    def _active(self) -> AbstractContextManager[None]:
        return nullcontext() if self._context is None else SLOT.activate(self._context)

    def _failed(self, error: BaseException) -> None:
        if self._parallel is not None:
            report(error)

    def _verify(self, whole: Any) -> None:
        """Compare the first training step with that of one device, where the user asked for it."""
        stage = self.lightning_module.trainer.state.stage  # type: ignore[attr-defined]
        wanted = self._config.verify == "first_batch" and not self._verified
        if not wanted or self._parallel is None or stage != "train":
            return
        self._verified = True
        if isinstance(whole, ShardedBatch):
            raise ConfigError(
                "verify='first_batch' runs the whole batch on one device, but a "
                "ContextParallelCollate has cut it already; take the collate function itself while "
                "you verify"
            )
        module = self.lightning_module  # type: ignore[attr-defined]

        def step(batch: Any) -> Any:
            with self.precision_plugin.train_step_context():  # type: ignore[attr-defined]
                return step_of(module)(batch)

        first = self._mesh is not None and self._mesh.rank == 0
        verify(module, whole, parallel=self._parallel, step=step, show=first).raise_if_wrong()

    def _stage(self) -> str:
        """Name of the stage with its number of batches, in which peers must agree."""
        trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        stage = str(getattr(trainer.state.stage, "value", trainer.state.stage))
        batches = {
            "train": "num_training_batches",
            "validate": "num_val_batches",
            "sanity_check": "num_sanity_val_batches",
            "test": "num_test_batches",
            "predict": "num_predict_batches",
        }.get(stage)
        return stage if batches is None else f"{stage} of {getattr(trainer, batches)} batches"

    def _averaged(self, loss: Tensor | None, shard: Shard) -> Tensor | None:
        """What a step returned, averaged over the group where the user asked for it."""
        if self._config.loss != "token_mean" or self._parallel is None:
            return loss
        if not self.lightning_module.automatic_optimization:  # type: ignore[attr-defined]
            raise RefusedError(
                "loss='token_mean' averages the loss that a step returns, but with manual "
                "optimization the step runs its own backward; make the loss with "
                "lightning_cp.functional.sequence_mean, or a swapped loss, and use loss='auto'"
            )
        return None if loss is None else self._parallel.token_mean(shard, loss)

    def _next_shard(self, batch: Any) -> Shard | None:
        """What was cut for a step; the same again where an optimizer repeats a step, as LBFGS."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self._repeats = batch, shard
        elif self._repeats is not None and self._repeats[0] is batch:
            shard = self._repeats[1]
        return shard

    def _step(
        self, step: Callable[..., Any], args: Any, kwargs: Any, *, predicts: bool = False
    ) -> Any:
        parallel, logs, seeds = self._parallel, self._logs, self._seeds
        if parallel is None or logs is None or seeds is None:
            return step(*args, **kwargs)
        try:
            shard = self._next_shard(args[0] if args else None)
            if shard is None:
                raise RefusedError(
                    "a step ran on a batch that did not pass through the strategy (a step that "
                    "takes a dataloader_iter does that); take the batch as the step's argument"
                )
            self._context = shard.context
            module = self.lightning_module  # type: ignore[attr-defined]
            with seeds.step(module.trainer), logs.step(module, shard):
                with parallel.active(shard):
                    output = step(*args, **kwargs)
                loss = None if predicts else self._averaged(_loss(output), shard)
                parallel.check(shard, loss)
                if self._table is not None:
                    self._table.served(shard.context)
            if predicts:
                return parallel.gather(output, shard)
        except BaseException as error:
            report(error)
            raise
        return _with_loss(output, loss, shard.context)


def _code(batch: Any) -> int | None:
    """Hash of a batch that is still on the CPU, None where only a transfer hook can read it."""
    try:
        return content_code(batch)
    except BatchError:
        return None


def _loss(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _with_loss(output: Any, loss: Tensor | None, context: Context) -> Any:
    if loss is None or (loss is _loss(output) and not loss.requires_grad):
        return output
    entered = reenter(loss, context) if loss.requires_grad else loss
    return {**output, "loss": entered} if isinstance(output, Mapping) else entered
