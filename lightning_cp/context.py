"""The frozen value that travels with a micro-batch, and the one process-wide slot that holds it.

[Note: one slot] The active context is process-wide and not thread-local: a backward pass on an
accelerator runs recomputed forwards on threads of the autograd engine. Everything that compiled
code may do at run time finds its context here, and what a backward needs is found again by the
integer handle that its forward saved.
"""

import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.compat import at_end_of_backward
from lightning_cp.errors import BatchError, RefusedError
from lightning_cp.mask import Mask, MaskMods, Visibility
from lightning_cp.plan import Plan, PlanKey, Schedule, build_plan
from lightning_cp.sequences import Sequence, plan_key

HANDLES = 1024
"""How many forwards may wait for their backward at a time."""


def mask_of(q: Sequence, kv: Sequence, sees: Visibility) -> Mask:
    """Who sees whom in an attention call on two sequences, or on one with itself.

    Raises:
        RefusedError: if sequences that are to be kept apart into documents attend to others.
    """
    if q != kv and any(s.documents and not s.as_transformers for s in (q, kv)):
        raise RefusedError(
            f"queries of a sequence of {q.length} tokens attend to another of {kv.length} tokens, "
            f"and rows hold several documents that are to be kept apart; which documents belong "
            f"together is not known: pass one document per row, or say documents='none'"
        )
    isolated = q == kv and (sees.is_causal or not q.as_transformers)
    return Mask(
        q.length,
        kv.length,
        sees.is_causal,
        q.documents if isolated else None,
        kv.keys,
        sees.window,
        sees.chunk,
        sees.prefix,
    )


class Ran(NamedTuple):
    """An attention call that ran: the handle of its plan, sizes, and which pass it was.

    `kept` says of a backward that its forward kept what heads were swapped for.
    """

    handle: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    backward: bool
    kept: bool = False


class Served(NamedTuple):
    """A kind of attention call, and which kernel computed it.

    Attributes:
        kernel: its name.
        passed: why those before it were passed over.
        terms: what the call did to its scores, see `Scores.terms`.
        dims: sizes of a key and of a value.
        dtype: of the queries.
    """

    kernel: str
    passed: tuple[str, ...]
    terms: tuple[str, ...]
    dims: tuple[int, int]
    dtype: torch.dtype


@dataclass
class CallLog:
    """What the swapped calls of one micro-step did: counts, and a hash that peers compare.

    `seen` holds what the attention calls asked to see, in the order of the first call of each, and
    for each the names of the sequences of its queries and keys; `ran` how often calls of every kind
    ran, recomputed ones included; `kernels` what computed them; `plans` what their handles stand
    for. `kinds` are the masks that a model of transformers asked for, by the names of the sequences
    of their keys; `packed` says that it looked for packed documents since the last one, and `edges`
    are cumulative lengths that it passed on, found to be those of the documents. `built` plans were
    made in this process after the batch had arrived, which with the layout, if that was made here,
    took `planning` seconds. `traced` says that a compiler traced an attention call.
    """

    attention: int = 0
    causal: int = 0
    loss: int = 0
    digest: int = 0
    seen: dict[Visibility, dict[tuple[str, str], None]] = field(default_factory=dict)
    ran: Counter[Ran] = field(default_factory=Counter)
    kernels: dict[Served, None] = field(default_factory=dict)
    plans: dict[int, PlanKey] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)
    packed: bool = False
    edges: list[Tensor] = field(default_factory=list)
    built: int = 0
    planning: float = 0.0
    traced: bool = False

    def record(self, signature: object) -> int:
        """Add a call's signature to the running hash and return its own 32-bit hash."""
        code = zlib.crc32(repr(signature).encode())
        self.digest = zlib.crc32(f"{self.digest}/{code}".encode())
        return code


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """Everything a swapped call needs to know about the micro-batch it belongs to.

    Attributes:
        rank: rank within the context-parallel group.
        world: size of the group.
        group: process group of the exchange.
        meta: CPU process group for checks.
        sequences: the named sequences of the batch that are cut.
        whole: those of which every rank holds all tokens.
        exchange: name of the schedule, or one with options.
        layout: name of the layout, for people.
        kernel: name of the kernel, or "auto".
        dropout: what dropout of weights in a swapped call does, see `Config.attention_dropout`.
        overlap: let messages travel while tiles are computed.
        compare_calls: compare every attention call's signature over the group before its first
            transfer (the first micro-steps of a stage).
        a2a: process group of the same ranks for swaps of heads for tokens, `group` where None.
        module: weak reference to the root module, for names in messages.
        plans: plans that came with the batch, made where it was loaded.
        attended: called when the work of an attention call has been queued, forward or backward.
        link: what carries the messages in place of the group (benchmarks).
        keeps: what arrived for the heads of this rank may be saved for the backward.
        log: what was called so far.
    """

    rank: int
    world: int
    group: Any
    meta: Any
    sequences: Mapping[str, Sequence]
    whole: Mapping[str, Sequence] = field(default_factory=dict)
    exchange: str | Schedule
    layout: str = ""
    kernel: str = "auto"
    dropout: str = "refuse"
    overlap: bool = True
    compare_calls: bool = False
    a2a: Any = None
    module: "weakref.ref[torch.nn.Module] | None" = None
    plans: Mapping[PlanKey, Plan] = field(default_factory=dict)
    attended: Callable[[], None] | None = None
    link: Any = None
    keeps: bool = True
    log: CallLog = field(default_factory=CallLog)

    @cached_property
    def _found(self) -> dict[tuple[int, int, int, Visibility] | None, int]:
        return {}

    def sequence_of(self, size: int) -> Sequence:
        """The sequence of which this rank holds `size` positions as its share.

        Raises:
            RefusedError: if no sequence, or more than one different sequence, has that size.
        """
        return self._among(size, self.sequences)[1]

    def held(self, size: int) -> Sequence:
        """The sequence of which this rank holds `size` positions, as its share or whole.

        Raises:
            RefusedError: if no sequence, or more than one different sequence, has that size.
        """
        return self.named(size)[1]

    def named(self, size: int) -> tuple[str, Sequence]:
        """The name of the sequence that `held` finds, and that sequence.

        Compiled code takes the only one there is for it: a graph that looked at sizes would hold
        for no other length, and the operators look at them when they run.

        Raises:
            RefusedError: see `held`.
        """
        if torch.compiler.is_compiling() and len(self.sequences) == 1 and not self.whole:
            return next(iter(self.sequences.items()))
        whole = any(s.length == size for s in self.whole.values())
        return self._among(size, self.whole if whole else self.sequences)

    def _among(self, size: int, among: Mapping[str, Sequence]) -> tuple[str, Sequence]:
        found = [(n, s) for n, s in among.items() if s.layout.size(self.rank) == size]
        if not found:
            sizes = {name: s.layout.size(self.rank) for name, s in self.sequences.items()}
            raise RefusedError(
                f"{size} tokens are no declared sequence's share on this rank (shares: {sizes}); "
                f"declare the sequence of tokens that every rank holds whole with 'whole' in "
                f"sequence_dims, or wrap code that is meant to work on local tokens in "
                f"functional.local()"
            )
        if any(other != found[0][1] for _, other in found[1:]):
            names = ", ".join(name for name, _ in found)
            raise RefusedError(
                f"{size} tokens are the share of several different sequences ({names}); give them "
                f"different lengths so that a call can be told apart"
            )
        return found[0]

    def own_handle(self) -> int:
        """Handle of this context alone, for calls without a plan."""
        if not SLOT.holds(self._found.get(None)):
            self._found[None] = SLOT.keep(self)
        return self._found[None]

    def handle(self, batch: int, q_size: int, kv_size: int, sees: Visibility) -> int:
        """Handle of the plan for a call with these rows, local sizes and visibility.

        Raises:
            RefusedError: if a size belongs to no declared sequence, if rows are padded
                differently and the call has other rows than the batch, or if queries that every
                rank holds attend to keys that are cut.
            BatchError: if the call has other rows than prefixes.
        """
        key = (batch, q_size, kv_size, sees)
        if not SLOT.holds(self._found.get(key)):
            (q_name, q), (kv_name, kv) = self.named(q_size), self.named(kv_size)
            if sees.rows not in (None, batch):
                raise BatchError(
                    f"prefixes of {sees.rows} batch rows for an attention call on {batch} rows; "
                    f"give one for every row of the call, or one that all rows share"
                )
            mask = mask_of(q, kv, sees)
            if mask.rows != (None,) and batch != len(mask.rows):
                raise RefusedError(
                    f"an attention call on {batch} rows, but the batch has {kv.batch} rows with "
                    f"padding or documents of their own; keep the rows of the batch in the call, "
                    f"or wrap it in functional.local()"
                )
            wanted = plan_key(q, kv, mask, rank=self.rank, exchange=self.exchange)
            self.log.seen.setdefault(sees, {})[q_name, kv_name] = None
            self._found[key] = handle = SLOT.keep(self, self._plan(wanted))
            self.log.plans[handle] = wanted
        return self._found[key]

    def _plan(self, wanted: PlanKey) -> Plan:
        """The plan that came with the batch, or the one of the cache, or a new one."""
        start, before = perf_counter(), build_plan.cache_info().misses
        plan = self.plans.get(wanted) or wanted.build()
        self.log.built += build_plan.cache_info().misses - before
        self.log.planning += perf_counter() - start
        return plan


class Bound(NamedTuple):
    """What a handle stands for."""

    context: Context
    plan: Plan | None


class Slot:
    """The active context, and the contexts that pending backwards will need.

    Attributes:
        active: the context of the step that is running.
        suspended: how many `functional.local()` are open.
        plain_attention: attention calls that found no context, for those who compare.
        mask_mods: functions that hide keys, by the names under which calls refer to them.
    """

    def __init__(self) -> None:
        self.active: Context | None = None
        self.suspended = 0
        self.plain_attention = 0
        self.mask_mods = MaskMods()
        self._in_backward = False
        self._handles: OrderedDict[int, Bound] = OrderedDict()
        self._next = 0

    @property
    def current(self) -> Context | None:
        """The context that swapped calls obey, None inside `functional.local()`."""
        return None if self.suspended else self.active

    def count_plain_attention(self) -> None:
        """Count an attention call outside any context, unless it is meant to be local."""
        self.plain_attention += self.active is None and not self.suspended

    @contextmanager
    def activate(self, context: Context | None) -> Iterator[None]:
        """Make `context` the active one, and restore what was there before."""
        before = self.active
        self.active = context
        try:
            yield
        finally:
            self._leave(before)

    def enter_backward(self, context: Context) -> None:
        """Called within a backward pass: make `context` active until the pass has ended.

        What is recomputed in the pass is then recomputed under the context of its forward.
        """
        if not self._in_backward:
            self._in_backward = True
            before = self.active
            at_end_of_backward(lambda: self._leave(before))
        self.active = context

    def clear(self) -> None:
        """Forget the active context, after an error too."""
        self._leave(None)
        self.suspended = 0

    def forget(self, group: Any) -> None:
        """Forget the forwards of a process group that is given back; none can be differentiated."""
        for handle in [h for h, bound in self._handles.items() if bound.context.group is group]:
            del self._handles[handle]

    def _leave(self, context: Context | None) -> None:
        self.active = context
        self._in_backward = False

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Let swapped calls do what they do without context parallelism."""
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def keep(self, context: Context, plan: Plan | None = None) -> int:
        """Remember a context and plan under a new handle; the oldest handles are forgotten."""
        handle = self._next
        self._next += 1
        self._handles[handle] = Bound(context, plan)
        while len(self._handles) > HANDLES:
            self._handles.popitem(last=False)
        return handle

    def holds(self, handle: int | None) -> bool:
        """Whether a handle still stands for something."""
        return handle in self._handles

    def bound(self, handle: int) -> Bound:
        """What `handle` stands for.

        Raises:
            RefusedError: if it was forgotten.
        """
        if handle not in self._handles:
            raise RefusedError(
                f"the plan of forward {handle} is gone: more than {HANDLES} forwards were waiting "
                f"for their backward; run backward sooner"
            )
        return self._handles[handle]


SLOT = Slot()


class _Reenter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        SLOT.enter_backward(ctx.context)
        return grads[0], None


def reenter(tensor: Tensor, context: Context) -> Tensor:
    """`tensor`, whose backward first makes `context` the active one; see `Slot.enter_backward`."""
    found: Tensor = _Reenter.apply(tensor, context)  # type: ignore[no-untyped-call]
    return found
