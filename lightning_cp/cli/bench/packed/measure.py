"""Rows under layouts, every rank in turn in this process, and the time of each rank.

[Note: clocks of ranks] Ranks that share a process take turns, see `executor.together`. The clock of
a rank runs from where its generator is resumed to where it gives way: its kernel calls, merges,
sums, packing, and the copy of a message that it takes. CPU time of the process counts, with one
thread; nothing travels.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from lightning_cp.balance import layout_of
from lightning_cp.cli.bench.attention.measure import Attention, Inputs
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.balance.rows import row
from lightning_cp.cli.bench.packed.peer import PEER, peer_bytes, peer_lengths
from lightning_cp.cli.bench.packed.results import Row
from lightning_cp.cli.bench.packed.settings import Settings, Sizes
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.exchange.executor import Turns
from lightning_cp.kernels import Kernel, resolve
from lightning_cp.kernels.base import Saved
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan import Plan, build_plan

T = TypeVar("T")
Clock = Callable[[], float]
"""Seconds."""


class GroupCall:
    """Forward and backward of all ranks of a group.

    Args:
        plans: of every rank.
        kernel: what computes tiles.
        inputs: local tensors of every rank.
        clock: of this process, see [Note: clocks of ranks].
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        kernel: Kernel,
        inputs: Sequence[Inputs],
        *,
        clock: Clock = time.process_time,
    ) -> None:
        self._plans, self._kernel, self._inputs = plans, kernel, inputs
        self._clock = clock

    def __call__(self) -> tuple[list[Attention], list[float]]:
        """Run once.

        Returns:
            What every rank computes, and the seconds of every rank.
        """
        spent = [0.0] * len(self._plans)
        boxes = Mailboxes()
        ranks = range(len(self._plans))
        calls = [
            executor.Call(self._kernel, x.q.shape[-1] ** -0.5, boxes.link(rank))
            for rank, x in enumerate(self._inputs)
        ]
        kept: list[list[Tensor]] = [[] for _ in ranks]
        outs = self._together(
            [
                executor.forward(plan, calls[rank], q, k, v, kept=kept[rank])
                for rank, (plan, (q, k, v, _)) in enumerate(self._each())
            ],
            spent,
        )
        grads = self._together(
            [
                executor.backward(
                    plan, calls[rank], Saved(q, *outs[rank], grad_out), k, v, kept=kept[rank]
                )
                for rank, (plan, (q, k, v, grad_out)) in enumerate(self._each())
            ],
            spent,
        )
        assert boxes.empty  # invariant: plans of one layout fit
        return [Attention(out, *own) for (out, _), own in zip(outs, grads, strict=True)], spent

    def _each(self) -> Iterator[tuple[Plan, Inputs]]:
        return zip(self._plans, self._inputs, strict=True)

    def _together(self, ranks: Sequence[Turns[T]], spent: list[float]) -> list[T]:
        return executor.together(
            [_timed(turns, spent, rank, self._clock) for rank, turns in enumerate(ranks)]
        )


def _timed(turns: Turns[T], spent: list[float], rank: int, clock: Clock) -> Turns[T]:
    """The turns of a rank; what they take is added to its seconds."""
    while True:
        start = clock()
        try:
            waits = next(turns)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            spent[rank] += clock() - start
        yield waits


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside, as every rank of a group that shares a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    settings: Settings, seed: int, *, warm_up: bool, clock: Clock = time.process_time
) -> list[Row]:
    """Every layout of one row, in turns: A B C A B C ...

    Args:
        settings: sizes, layouts and repeats.
        seed: the row.
        warm_up: first run the first layout once more, and drop it.
        clock: of this process.

    Returns:
        One row for each layout.
    """
    sizes = settings.sizes
    lengths = row(seed, sizes.tokens)
    whole = inputs_of(sizes, seed)
    kernel = resolve("auto", whole.q, whole.v)
    calls = []
    for name in settings.layouts:
        layout = layout_of(name, lengths, sizes.ranks)
        plans = _plans(sizes, layout, lengths)
        shards = [local_of(whole, layout, rank) for rank in range(sizes.ranks)]
        calls.append(GroupCall(plans, kernel, shards, clock=clock))
    del whole
    if warm_up:
        calls[0]()
    times: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(settings.repeats):
        for call, found in zip(calls, times, strict=True):
            found.append(call()[1])
    return [
        row_of(sizes, seed, name, [list(of_rank) for of_rank in zip(*found, strict=True)])
        for name, found in zip(settings.layouts, times, strict=True)
    ]


def row_of(sizes: Sizes, seed: int, name: str, seconds: list[list[float]]) -> Row:
    """The row of a layout, or of the peer, of which `seconds[rank][run]` were measured."""
    lengths = row(seed, sizes.tokens)

    def plans(layout: str) -> list[Plan]:
        return _plans(sizes, layout_of(layout, lengths, sizes.ranks), lengths)

    own = plans("per_document_zigzag" if name == PEER else name)
    most = max(received(plan, sizes) for plan in own)
    if name == PEER:
        taken = peer_lengths(lengths, sizes.ranks)
        elements = 2 * sizes.heads * sizes.head_dim
        itemsize = DTYPES[sizes.dtype].itemsize
        most = peer_bytes(taken, sizes.ranks, row=elements, itemsize=itemsize)
    return Row(
        command=0,
        draw=seed,
        layout=name,
        work_max_over_mean=_max_over_mean([_work(plan, sizes) for plan in own]),
        tokens_max_over_mean=_max_over_mean([plan.q_size for plan in own]),
        zigzag_work_max_over_mean=_max_over_mean([_work(plan, sizes) for plan in plans("zigzag")]),
        bytes_received=most * (sizes.layers if sizes.mode == "step" else 1),
        seconds=seconds,
    )


def received(plan: Plan, sizes: Sizes) -> int:
    """Bytes that a rank receives in a forward and a backward."""
    traffic = plan.traffic(
        kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        itemsize=DTYPES[sizes.dtype].itemsize,
        kept=True,
    )
    return traffic.forward_received + traffic.backward_received


def _work(plan: Plan, sizes: Sizes) -> int:
    """Score elements of all heads that a rank computes."""
    return plan.work() * plan.own_heads(sizes.heads, sizes.heads)[0]


def _plans(sizes: Sizes, layout: Layout, lengths: Sequence[int]) -> list[Plan]:
    return [plan_of(sizes, layout, lengths, rank) for rank in range(sizes.ranks)]


def plan_of(sizes: Sizes, layout: Layout, lengths: Sequence[int], rank: int) -> Plan:
    """The plan of a rank for a row of documents."""
    mask = Mask(sizes.tokens, sizes.tokens, documents=(0, *accumulate(lengths)))
    return build_plan(layout, layout, mask, rank=rank, exchange=sizes.exchange)


def inputs_of(sizes: Sizes, seed: int) -> Inputs:
    """Whole tensors of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, sizes.heads, sizes.tokens, sizes.head_dim)
    dtype = DTYPES[sizes.dtype]
    return Inputs(*(torch.randn(shape, generator=generator).to(dtype) for _ in Inputs._fields))


def local_of(whole: Inputs, layout: Layout, rank: int) -> Inputs:
    """A rank's tokens, stored token by token as a model's projections leave them."""
    shards = (layout.shard(x, rank=rank, dim=2) for x in whole)
    return Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards))


def _max_over_mean(values: Sequence[int]) -> float:
    return max(values) / fmean(values)
