"""Context parallelism without Lightning: cut a batch, run a model on it, put outputs together."""

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_cp.balance import Balanced
from lightning_cp.comm.digest import Digest
from lightning_cp.comm.failure import report
from lightning_cp.comm.gather import all_gather
from lightning_cp.config import Config
from lightning_cp.context import SLOT, CallLog, Context
from lightning_cp.data import Cut, cut
from lightning_cp.data.collate import ShardedBatch, Share, Uncut, sharded
from lightning_cp.data.containers import leaves
from lightning_cp.data.cut import Rules
from lightning_cp.data.expected import expected_calls, expected_work
from lightning_cp.data.outputs import gather_outputs
from lightning_cp.data.valid import valid_tokens
from lightning_cp.diagnostics.audit import Audit
from lightning_cp.diagnostics.slow import warn_of_reference
from lightning_cp.errors import BatchError, MismatchError, RefusedError
from lightning_cp.loss import token_mean
from lightning_cp.plan import EXCHANGES, Schedule
from lightning_cp.spans import Spans, total
from lightning_cp.swap import Installation
from lightning_cp.swap.huggingface import HuggingFace, Traits, traits
from lightning_cp.swap.litgpt import LitGPT
from lightning_cp.swap.where import suspects

WATCHED = 2
"""Micro-steps of a stage in which every attention call, and the loss, is compared at once."""


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a batch, and the context under which a model may see it.

    Attributes:
        batch: the batch with its per-token fields cut.
        context: what swapped calls obey.
        cut: what was cut and how.
        layout: name of the layout.
        digest: the comparison with the peers, under way.
        audited: whether the forward is the first of its stage.
    """

    batch: Any
    context: Context
    cut: Cut
    layout: str
    digest: Digest
    audited: bool


class ContextParallel:
    """Makes a group of ranks behave like one bigger device.

    Creating one swaps attention and losses in this process until `close`; outside of `active`
    nothing changes.

    Args:
        group: process group of the ranks that share each sequence.
        meta: gloo group of the same ranks, for checks.
        rank: rank within the group.
        world: size of the group.
        config: options.
        device_type: "cpu" or "cuda".
        a2a: a second group of the same ranks, for swaps of heads for tokens; `group` if None.

    Raises:
        ConfigError: if overrides cannot be installed, or layout or exchange do not fit `world`.
    """

    def __init__(
        self,
        group: Any,
        *,
        meta: Any,
        rank: int,
        world: int,
        config: Config | None = None,
        device_type: str = "cpu",
        a2a: Any = None,
    ) -> None:
        self.config = config or Config()
        self.rank, self.world = rank, world
        self.config.check(world)
        self.group, self.meta, self.a2a = group, meta, a2a
        self._installation = Installation((device_type,))
        self._adapters = (HuggingFace(), LitGPT())
        self._steps: Counter[str] = Counter()
        self._last: Context | None = None
        self._traced = False
        self._loss: Tensor | None = None
        self._slow = False
        self.attended: Callable[[], None] | None = None
        self._known: tuple[Any, Traits] = (None, Traits())

    def close(self) -> None:
        """Take attention and losses back to what they were; calling it again does nothing."""
        for adapter in self._adapters:
            adapter.remove()
        self._installation.remove()
        SLOT.clear()

    def shard(
        self,
        batch: Any,
        *,
        module: torch.nn.Module | None = None,
        stage: str = "train",
        code: int | None = None,
    ) -> Shard:
        """Cut this rank's tokens out of a whole batch and start comparing it with the peers.

        Args:
            batch: the whole batch, the same on every rank of the group: dict, dataclass, tuple or
                tensor, nested or not; or a `ShardedBatch`, which is not cut again.
            module: root module, for names in messages, to see whether it takes positions, and to
                prepare models of Hugging Face and litgpt in it.
            stage: the first micro-steps of every stage are watched closely.
            code: `content_code(batch)` where it is known already.

        Raises:
            BatchError: on every rank, if the batch cannot be cut.
            MismatchError: on every rank, if one rank could not cut its batch.
        """
        for adapter in self._adapters:
            adapter.prepare(module)
        step = self._steps[stage]
        self._steps[stage] += 1
        try:
            found = batch if isinstance(batch, ShardedBatch) else self._cut(batch, module, code)
            found.check(rank=self.rank, world=self.world)
        except BatchError as error:
            self._compare(stage, step, None, str(error))
            raise
        part = found.part
        self._traced |= self._last is not None and self._last.log.traced
        context = Context(
            rank=self.rank,
            world=self.world,
            group=self.group,
            a2a=self.a2a,
            meta=self.meta,
            sequences=part.sequences,
            whole=part.whole,
            exchange=part.exchange,
            layout=found.layout,
            kernel=self.config.attention_backend,
            dropout=self.config.attention_dropout,
            overlap=self.config.overlap,
            compare_calls=step < WATCHED,
            module=weakref.ref(module) if module is not None else None,
            plans=found.plans,
            attended=self.attended,
            keeps=not self._traced,
            log=CallLog(planning=part.seconds),
        )
        digest = self._compare(stage, step, found, "")
        self._last, self._loss = context, None
        return Shard(part.batch, context, part, found.layout, digest, step == 0)

    def share(self, module: torch.nn.Module | None = None) -> Share:
        """How this rank cuts the next batch, for another process that is to do it.

        Args:
            module: root module; see `shard`.
        """
        layout, log = self._layout(), self._last.log if self._last is not None else None
        known = self._traits(module)
        rules = Rules(
            layout=layout,
            adaptive=self.config.layout == "auto",
            work=expected_work(log),
            exchanges=self._exchanges(),
            calls=expected_calls(log),
            sequence_dims=self.config.sequence_dims,
            takes_positions=known.takes_positions,
            documents=self.config.documents,
            as_transformers=known.as_transformers,
            decodes=known.decodes,
            pad_to_multiple_of=self.config.pad_to_multiple_of,
        )
        share = Share(rules, self.rank, self.world)
        expected = {} if log is None else log.seen
        calls = tuple((sees, tuple(pairs)) for sees, pairs in expected.items())
        return share._replace(calls=calls) if calls else share

    def _cut(self, batch: Any, module: torch.nn.Module | None, code: int | None) -> ShardedBatch:
        if isinstance(batch, Uncut):
            raise BatchError(batch.reason)
        if any(isinstance(value, ShardedBatch | Uncut) for _, value in leaves(batch)):
            raise BatchError(
                "several loaders give one batch together, and parts of it were cut where they were "
                "loaded; use shard_in='main' and the loaders' own collate functions, so that the "
                "batch is cut as a whole"
            )
        share = self.share(module)
        part = cut(batch, share.rules, rank=self.rank, world=self.world)
        return sharded(batch, part, share, code=code)

    @contextmanager
    def active(self, shard: Shard) -> Iterator[None]:
        """Run model code on a shard: attention and losses see the whole sequence.

        Run the backward inside as well. The first forward of every stage is audited.

        Raises:
            MismatchError: on every rank, if the peers' batches differ.
            RefusedError: from a call that would be wrong on a shard.
        """
        with _way_out():
            shard.digest.wait()
        audit: AbstractContextManager[object] = (
            Audit(shard.context) if shard.audited else nullcontext()
        )
        try:
            with SLOT.activate(shard.context), audit:
                yield
        except BaseException as error:
            report(error)  # peers that wait for this rank can then say why it does not come
            raise

    def token_mean(self, shard: Shard, loss: Tensor) -> Tensor:
        """The mean over the tokens of the group, of a mean that each rank took over its own.

        Args:
            shard: the shard that was run.
            loss: one element, a mean over this rank's tokens that count: the sum of the batch's
                loss_mask, else its shift_labels or labels other than -100, else its
                attention_mask, else all; dummy tokens never count. It may be NaN where none does.

        Returns:
            The same on every rank, with the exact gradient; see `lightning_cp.loss.token_mean`.
        """
        with SLOT.activate(shard.context):
            return token_mean(loss, valid_tokens(shard.cut, rank=self.rank))

    def check(self, shard: Shard, loss: Tensor | None) -> None:
        """What must hold after a forward: attention went through the swap, and losses agree.

        Args:
            shard: the shard that was run.
            loss: what the step returned, None where it returned none.

        Raises:
            RefusedError: if no attention call was swapped.
            MismatchError: on every rank, if the loss differs between peers; later micro-steps are
                compared when the next batch arrives.

        Warns:
            ContextParallelWarning: on the first rank, once, of calls that are computed slowly.
        """
        if shard.context.log.attention == 0:
            raise RefusedError(
                f"{suspects(shard.context)}: no attention call of this step went through context "
                f"parallelism, so every rank attended to its own tokens alone (or to none); call "
                f"torch.nn.functional.scaled_dot_product_attention or lightning_cp.attend, or use "
                f"data parallelism for a model without attention"
            )
        self._slow = self._slow or warn_of_reference(shard.context)
        self._loss = None if loss is None else loss.detach()
        if shard.context.compare_calls and loss is not None:
            with _way_out():
                Digest({"loss": float(loss.detach())}, {}, self.meta).wait()

    def unshard(self, tensor: Tensor, shard: Shard, *, dim: int = 1) -> Tensor:
        """Gather a per-token output: whole rows in the original order, dummies removed.

        Args:
            tensor: this rank's part, with its tokens at `dim`; every rank of the group calls.
            shard: the shard it was computed from.
            dim: the sequence dimension.

        Returns:
            The whole tensor on every rank, without gradient.

        Raises:
            RefusedError: if the size at `dim` is not this rank's share of a sequence of the batch.
        """
        sequence = shard.context.sequence_of(tensor.shape[dim])
        shards = all_gather(
            tensor.detach(), sequence.layout.sizes, dim=dim, rank=self.rank, group=self.group
        )
        return sequence.layout.unshard(shards, dim=dim).narrow(dim, 0, sequence.length)

    def gather(self, output: Any, shard: Shard) -> Any:
        """Whole rows of what a step returned, where `predict_gather` says; see `gather_outputs`.

        Args:
            output: tensors, text and numbers in any container; every rank of the group calls.
            shard: the shard it was computed from.

        Returns:
            With "rank0_cpu" the whole output on the CPU of the first rank and None on the others,
            with "all" the whole output on every rank, with "none" the output as it is.

        Raises:
            MismatchError: on every rank, if a value that is no part of the sequence differs.
            RefusedError: on every rank, if it is unclear what an output holds.
        """
        if self.config.predict_gather == "none":
            return output
        to = 0 if self.config.predict_gather == "rank0_cpu" else None
        dims = self.config.sequence_dims or {}
        return gather_outputs(output, shard.context, declared=dims, to=to)

    def _exchanges(self) -> tuple[str | Schedule, ...]:
        return EXCHANGES if self.config.exchange == "auto" else (self.config.exchange,)

    def _layout(self) -> str | Balanced:
        """The layout of the next batch: even work where attention was causal, else plain runs."""
        if self.config.layout != "auto":
            return self.config.layout
        log = self._last.log if self._last is not None else None
        return "contiguous" if log is not None and log.attention and not log.causal else "zigzag"

    def _traits(self, module: torch.nn.Module | None) -> Traits:
        """What a module says about its batches, looked up once."""
        if self._known[0] is not module:
            self._known = (module, traits(module))
        return self._known[1]

    def _compare(self, stage: str, step: int, found: ShardedBatch | None, error: str) -> Digest:
        """Start the one comparison of a micro-step; with an error, finish it too."""
        shapes = found.shapes if found is not None else ""
        contents = found.code if found is not None else 0
        layout = found.layout if found is not None else _name(self._layout())
        spans = [s.layout.spans for s in found.part.sequences.values()] if found is not None else []
        exchange = str(found.part.exchange) if found is not None else ""
        calls = self._last.log.digest if self._last is not None else 0
        loss = float(self._loss) if self._loss is not None else 0.0
        digest = Digest(
            {
                "could cut the batch": int(not error),
                "stage and micro-step": zlib.crc32(f"{stage}/{step}".encode()),
                "shapes of the batch": zlib.crc32(shapes.encode()),
                "contents of the batch": contents,
                "layout": zlib.crc32(f"{layout} {spans}".encode()),
                "exchange": zlib.crc32(exchange.encode()),
                "calls of the micro-step before": calls,
                "loss of the micro-step before": loss,
            },
            {
                "could cut the batch": error or "a batch that can be cut",
                "stage and micro-step": f"micro-step {step} of {stage}",
                "shapes of the batch": shapes or "no shapes",
                "contents of the batch": f"hash {contents:08x}",
                "layout": _shown(layout, spans),
                "exchange": exchange,
            },
            self.meta,
        )
        if error:
            try:
                digest.wait()
            except MismatchError as mismatch:
                raise BatchError(f"{error} ({mismatch})") from mismatch
        return digest


def _name(layout: str | Balanced) -> str:
    return layout if isinstance(layout, str) else layout.name


def _shown(layout: str, spans: Sequence[Sequence[Spans]]) -> str:
    """A layout of every sequence in a message."""
    sizes = " and ".join(", ".join(str(total(own)) for own in each) for each in spans)
    return f"{layout} of {sizes} tokens, hash {zlib.crc32(str(spans).encode()):08x}"


@contextmanager
def _way_out() -> Iterator[None]:
    """Says what to do about a loss that differs between peers."""
    try:
        yield
    except MismatchError as error:
        if "\n  loss" not in str(error):
            raise
        raise MismatchError(
            f"{error}\na loss must be over the whole sequence, and one that is computed by hand "
            f"from this rank's tokens is not: use torch.nn.functional.cross_entropy or another "
            f"swapped loss (called through its module, not imported by name), "
            f"lightning_cp.functional.sequence_mean, or loss='token_mean' for a mean over local "
            f"tokens"
        ) from error
