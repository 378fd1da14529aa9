"""Everything of the strategy that is the same for both Lightning packages."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from _lightning_cp_autoload import PRESETS
from lightning_cp.balance import Balanced
from lightning_cp.blocks import WrapPolicy
from lightning_cp.compat import forward_sync_buffers
from lightning_cp.config import Config, SequenceDim
from lightning_cp.errors import ConfigError
from lightning_cp.materialize import has_meta
from lightning_cp.plan import Exchange
from lightning_cp.plugin.collectives import Collectives
from lightning_cp.plugin.data import Loading
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.launching import Launching, StartMethod, checked
from lightning_cp.plugin.mixin import ContextParallelMixin
from lightning_cp.plugin.parts import LayerPlan
from lightning_cp.plugin.signals import Signalled
from lightning_cp.plugin.windows import GatherWindows

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

Layouts = Literal["auto", "balanced", "contiguous", "per_document_zigzag", "zigzag"] | Balanced
Exchanges = Literal["auto", "allgather", "direct", "hybrid", "ring", "ulysses"] | Exchange
Packages = Literal["flash_attn", "flash_attn_3", "flash_attn_4"]
Backends = Literal["auto", "sdpa", "cudnn", "efficient", "flash", "flex", "reference"] | Packages

OTHERS = {
    name: f"that of {other} takes lightning_cp.plugin.{module}.ContextParallelStrategy"
    for name, other, module in (
        ("lightning.pytorch", "pytorch_lightning", "pytorch_lightning"),
        ("pytorch_lightning", "lightning.pytorch", "strategy"),
    )
}
"""By package, where the other one finds its strategy."""


class ContextParallelBase(
    ContextParallelMixin, Loading, Launching, Signalled, GatherWindows, Collectives, Host
):
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
        data_parallel_replicate_size: with zero_stage=1 to 3, how many replicas the groups make up:
            parameters are in parts within each, and every replica has all of them (HSDP).
        tensor_parallel_size: ranks that share each layer: the ranks of the job are those of
            `data_parallel_size` x `context_parallel_size` x this. Which layers are shared, and how,
            says `tensor_parallel_plan`, or a configure_model with
            `self.device_mesh["tensor_parallel"]`. Needs zero_stage=1 to 3, or a configure_model
            that calls fully_shard with `self.device_mesh["data_parallel"]`.
        tensor_parallel_plan: styles of torch.distributed.tensor.parallel by the names of modules
            (`{"net.blocks.*.mlp.0": ColwiseParallel()}`), or a function that is called with the
            module and the mesh of its ranks.
        zero_stage: what is in parts, on all ranks of a replica, and gathered when it is needed
            (FSDP2): 0, nothing, every rank holds all; 1, parameters and the state of optimizers
            from one step to the next; 2, gradients as well; 3, also parameters from the forward of
            a block to its backward.
        accumulate_gradients: "whole": while gradients are accumulated they stay whole on every
            rank, and are averaged once; "parts": every backward leaves each rank its part of the
            average, in less memory; "auto": "whole" with zero_stage=0 and 1, else "parts".
        layout: which tokens a rank holds: "zigzag" (even work for causal attention), "contiguous",
            "balanced" (for packed rows: even work and tokens, short documents whole on one rank,
            long ones on few), "per_document_zigzag", or "auto": zigzag, contiguous once a step made
            no causal call, and balanced for a row of several documents where that is predicted to
            take less time. `lightning_cp.balance.Balanced` takes options.
        exchange: how keys and values travel: "direct" (exactly what a rank's queries see, from the
            rank that holds it; memory of two shards), "ring" (from neighbour to neighbour, memory
            of two shards), "allgather" (memory of the whole sequence, fewer and larger tiles),
            "ulysses" (each rank gets all tokens of a part of the heads), "hybrid" (ulysses among
            neighbours, direct between blocks of them), or "auto": for every batch what is predicted
            to take least time, direct before a call was seen. `lightning_cp.plan` has `Direct`,
            `Ring`, `AllGather`, `Ulysses` and `Hybrid`, which take options, and `Replicated`, for
            debugging.
        overlap: messages travel while tiles are computed; False, for comparison, posts them when
            they are due.
        attention_backend: what computes a tile: "sdpa" (the first of torch's fused kernels that
            fits: that for CPUs; on CUDA "flash" for half precision, "efficient" for float32), one
            of these two, "cudnn", "flash_attn", "flash_attn_3" or "flash_attn_4" by name, "flex"
            for a mask_mod on CUDA, "reference" (plain maths, slow), or "auto": sdpa, with
            flash_attn where "flash" does not fit, and "flex" or "reference" for what none of these
            computes.
        attention_dropout: what dropout of attention weights in training does: "refuse"; "tile", it
            drops with the same probability as one device, by numbers of every call, rank and block
            that the backward and recomputation repeat ("reference" computes it, which "auto" then
            takes); "off", it is left out, which the start table says.
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
            declaration. Of a batch with several sequences, the name of the sequence and the
            dimension, `("target", 1)`; with "whole", `("image", 1, "whole")`, every rank keeps it.
        pad_to_multiple_of: fill rows with dummy tokens up to a multiple of this.
        data: "check" compares the batches of the ranks of a group, which each of them reads;
            "broadcast" lets the first of them read, for datasets that give every process something
            else.
        shard_in: where batches are cut: "worker", in the collate function of every loader, so that
            whole batches stay in its workers; "main", after on_before_batch_transfer,
            transfer_batch_to_device and on_after_batch_transfer have seen the whole batch; "auto",
            in the workers of loaders that have any, unless one of these hooks is overridden or
            something else needs whole batches, which the start table says. In workers, the layout
            "auto" stays what it was when they started.
        predict_gather: who gets what `predict_step` returns, as whole rows in their original order:
            "rank0_cpu", the first rank of every group, on the CPU (the others get None, and their
            prediction writers write nothing); "all" ranks; "none", every rank keeps its part.
            Tensors [B, S_local, ...] are put together, and those whose dimension is declared in
            `sequence_dims` as "predictions.name"; everything else must be equal on all ranks.
        auto_wrap_policy: with zero_stage=1 to 3, which modules are gathered on their own: classes,
            or a function that says so of a module; None takes the children of every `ModuleList` or
            `Sequential` that holds two or more of their class. What is left is gathered for a step.
        mp_policy: with zero_stage=1 to 3, dtypes of gathered parameters and reduced gradients; None
            computes what the precision of the Trainer does on one device, and averages gradients
            of half-precision parameters in float32.
        param_gather: when the parameters of the next block are gathered: "fsdp", in torch's own
            order; "early", when a block begins, forward and backward; "after_attention", when its
            attention has been queued, so that its linear layers hide the gather and its keys do
            not meet it; "auto", after the first step what is predicted to be fastest for its sizes.
        cpu_offload: with zero_stage=1 to 3, keep the parts, and the state that optimizers make of
            them, in the memory of the CPU.
        save_distributed_checkpoint: with zero_stage=1 to 3, every rank writes its parts into a
            folder, which any number of ranks can read, "async" from copies on the CPU while
            training goes on; else the first rank writes one file.
        verify: "first_batch" runs the first training batch (at most 512 tokens of every row) with
            and without context parallelism before anything is trained, prints a table, and stops
            with the name of the first module that differs; "off".
        find_unused_parameters: with zero_stage=0, let a backward leave parameters out, as with
            `toggle_optimizer` or a branch that is not taken; that of torch's
            DistributedDataParallel. With zero_stage=1 to 3 a backward may always do so.
        start_method: how the Trainer starts the processes of a node where nobody else does:
            "popen", the script again; "fork" or "spawn", by Python's multiprocessing, after which
            the module in the process that started them has the parameters of the run; "auto",
            "fork" in notebooks and other interactive sessions, else "popen".
        process_group_backend: backend of the default process group.
        timeout: how long a collective may wait.

    Raises:
        ConfigError: if an option is not allowed; sizes are checked when the number of processes is
            known.
    """

    strategy_name = "context_parallel"
    _followed: frozenset[int] = frozenset()
    _num_nodes = 1
    _flavor: ClassVar[Flavor]

    def __init__(
        self,
        context_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        tensor_parallel_plan: LayerPlan | None = None,
        zero_stage: int = 0,
        accumulate_gradients: Literal["auto", "whole", "parts"] = "auto",
        layout: Layouts = "auto",
        exchange: Exchanges = "auto",
        overlap: bool = True,
        attention_backend: Backends = "auto",
        attention_dropout: Literal["refuse", "tile", "off"] = "refuse",
        documents: Literal["auto", "position_ids", "none"] = "auto",
        loss: Literal["auto", "token_mean"] = "auto",
        sequence_dims: dict[str, SequenceDim] | None = None,
        pad_to_multiple_of: int | None = None,
        data: Literal["check", "broadcast"] = "check",
        shard_in: Literal["auto", "worker", "main"] = "auto",
        predict_gather: Literal["rank0_cpu", "all", "none"] = "rank0_cpu",
        auto_wrap_policy: WrapPolicy | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        param_gather: Literal["auto", "fsdp", "early", "after_attention"] = "auto",
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool | Literal["async"] = False,
        verify: Literal["off", "first_batch"] = "off",
        find_unused_parameters: bool = False,
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__()
        self._config = Config(
            layout=layout,
            exchange=exchange,
            overlap=overlap,
            attention_backend=attention_backend,
            attention_dropout=attention_dropout,
            documents=documents,
            loss=loss,
            sequence_dims=sequence_dims,
            pad_to_multiple_of=pad_to_multiple_of,
            data=data,
            shard_in=shard_in,
            predict_gather=predict_gather,
            zero_stage=zero_stage,
            accumulate_gradients=accumulate_gradients,
            param_gather=param_gather,
            verify=verify,
        )
        self._wrap, self._policy, self._offload = auto_wrap_policy, mp_policy, cpu_offload
        self._replicate_size, self._tp_size = data_parallel_replicate_size, tensor_parallel_size
        self._distributed_checkpoint = save_distributed_checkpoint
        self._find_unused, self._layer_plan = find_unused_parameters, tensor_parallel_plan
        self._start_method = checked(start_method)
        self._check_options()
        self._cp_size, self._dp_size = context_parallel_size, data_parallel_size
        self._process_group_backend, self._timeout = process_group_backend, timeout
        self._forward_redirection = self._flavor.forward_redirection()

    def __repr__(self) -> str:
        """Says which Trainer takes it: one of the other package quotes this when it refuses it."""
        return (
            f"{type(self).__module__}.{type(self).__name__} for the Trainer of "
            f"{self._flavor.pytorch}; {OTHERS[self._flavor.pytorch]}"
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self._resolve(self.world_size, self.num_processes)
        if self.topology.dp > 1:
            self._flavor.reset_seed()
        if self.world_size > 1:
            self._connect()
            self._start_parallel(device=self.root_device, timeout=self._timeout)
        module = self.lightning_module
        asks = module is not None and self._flavor.is_overridden("configure_model", module)
        self._make_device_mesh(self.topology, wanted=asks)

    def _connect(self) -> None:
        if self.cluster_environment is None:
            raise ConfigError("the Trainer gave this strategy no cluster environment")
        device = self.root_device
        self._flavor.connect(
            self.cluster_environment,
            self._process_group_backend or self._flavor.default_backend(device),
            timeout=self._timeout,
            device_id=None if device.type == "cpu" else device,
        )

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == self._flavor.fitting
        if self.accelerator is None or self.model is None:
            raise RuntimeError("setup() is called by the Trainer, after it connected a module")
        self._refuse_iterators(self.lightning_module)
        self._choose_place(trainer)
        self.accelerator.setup(trainer)
        self._prepare_module()
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        if not has_meta(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._shards:
            self._shard_parameters(trainer)
            self._open_window(self.model)
        if fitting:
            self.model = self._setup_model(self.model)
            self.setup_optimizers(trainer)
        elif self.world_size > 1 and not self._shards:
            self._flavor.sync_module_states(self.model)
        self.setup_precision_plugin()
        self._watch_metrics(self.lightning_module)
        self._mute_writers(trainer.callbacks)  # type: ignore[attr-defined]
        if fitting:
            self._flavor.optimizers_to_device(self.optimizers, self.root_device)

    @override
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Average gradients over every rank: the plain mean is right, see docs on gradients.

        Buffers follow the first virtual device where there are several; within one they are equal.
        """
        self._followed = _trained(model)
        if self._mesh is None or self._shards or not self._followed:
            return model
        return DistributedDataParallel(
            model,
            device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
            process_group=self._mesh.grad,
            find_unused_parameters=self._find_unused,
            **forward_sync_buffers(self.topology.dp > 1),
        )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Average the gradients of what is trained now: parameters may be frozen and thawed."""
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        if self._mesh is None or self._shards or module is None:
            return
        if _trained(module) != self._followed:
            self.model = self._setup_model(module)

    @override
    def model_to_device(self) -> None:
        if self.model is not None and not self._shards:
            self.model.to(self.root_device)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        module = self.lightning_module
        manual = module is not None and not module.automatic_optimization
        if isinstance(self.model, DistributedDataParallel) and manual:
            self._flavor.prepare_for_backward(self.model, closure_loss)
        elif manual:
            self._see_backward(closure_loss)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            with self._accumulate():
                yield

    @override
    def _say(self, message: str) -> None:
        self._flavor.rank_zero_info(message)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, options in PRESETS.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, "Ranks share sequences", **options)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed(exception)
        self._close_window(failed=True)
        self._stop_parallel()

    @override
    def teardown(self) -> None:
        self._close_window()
        self._stop_parallel()
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel):
            self.model = module
        self._close_groups()
        trainer = module._trainer if module is not None else None
        fitted = trainer is not None and trainer.state.fn == self._flavor.fitting
        if self._layer_sync and self.model is not None and fitted:
            self.model = self._layer_sync.revert(self.model)
        super().teardown()


def _trained(module: torch.nn.Module) -> frozenset[int]:
    return frozenset(id(p) for p in module.parameters() if p.requires_grad)
