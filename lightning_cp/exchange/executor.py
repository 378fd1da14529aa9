"""The loop that runs a plan, forward and backward. It owns no decisions.

Legend: B batch, H query heads, Hk key heads, S local queries, D head size.

[Note: turns] Forward and backward are generators that give way before every wait for messages.
One rank runs its own to the end; ranks that share a process take turns, see `together`.
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_cp.comm.p2p import Link
from lightning_cp.exchange.probe import Probe, silent
from lightning_cp.exchange.running import RunningAttention, RunningSum
from lightning_cp.exchange.transfers import Fetch, Homing, Pair, empty_pair
from lightning_cp.kernels import Kernel
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.plan import Plan, Tile

T = TypeVar("T")
Turns = Generator[None, None, T]


class Heads(NamedTuple):
    """A group of heads: key heads, and the query heads that read them."""

    q: slice
    kv: slice


def token_major(q: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """An empty `[B, H, S, D]` stored as `[B, S, H, D]`, as torch's own kernels return it."""
    batch, heads, size, _ = q.shape
    return q.new_empty(batch, size, heads, head_dim, dtype=dtype).transpose(1, 2)


def forward(
    plan: Plan,
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    link: Link,
    probe: Probe = silent,
) -> Turns[tuple[Tensor, Tensor]]:
    """Attention of this rank's queries over the keys of the whole group.

    Args:
        plan: this rank's plan.
        kernel: what computes tiles, with the scores of the call.
        q: local queries `[B, H, S, D]`.
        k: local keys `[B, Hk, Sk, D]`.
        v: local values `[B, Hk, Sk, Dv]`.
        scale: factor on the scores.
        link: what carries the messages; every rank of the group calls.
        probe: is told of the phases.

    Returns:
        Output `[B, H, S, Dv]` in the dtype of `q`, and LSE `[B, H, S]` in float (double for
        double), -inf and output 0 where a query sees no key. (As a generator: see [Note: turns].)
    """
    dtype = state_dtype(q.dtype, len(plan.rounds))
    out = token_major(q, v.shape[-1], q.dtype)
    lse = q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))
    groups = _groups(plan, q, k)
    own = [Pair(k[:, heads.kv], v[:, heads.kv]) for heads in groups]
    fetch = Fetch(plan, own, link, probe)
    fetch.post()
    for heads, here in zip(groups, own, strict=True):
        results, queries = (out[:, heads.q], lse[:, heads.q]), q[:, heads.q]
        running = RunningAttention(
            results[0] if q.dtype == dtype else token_major(queries, v.shape[-1], dtype),
            results[1] if lse.dtype == dtype else torch.empty_like(results[1], dtype=dtype),
        )
        for index, step in enumerate(plan.rounds):
            buffer = here  # gives up the buffer of the round before
            if index:
                yield
                buffer = fetch.wait()
                fetch.post(buffer)
            made = kernel.part(heads.q, plan.queries, step.keys)
            _attend(made, step.tiles, queries, buffer, running, scale=scale, probe=probe)
        del buffer
        running.finish()
        running.sink(kernel.scores.per_head.of(heads.q).sinks)
        with probe("copy"):
            _round_into(results, (running.out, running.lse))
        del running
    return out, lse


def _attend(
    kernel: Kernel,
    tiles: Sequence[Tile],
    q: Tensor,
    buffer: Pair,
    running: RunningAttention,
    *,
    scale: float,
    probe: Probe,
) -> None:
    parts = kernel.forward(tiles, q, buffer.k, buffer.v, scale=scale)
    while True:
        with probe("kernel"):
            part = next(parts, None)
        if part is None:
            return
        with probe("merge"):
            running.add(part)
        del part


def backward(
    plan: Plan,
    kernel: Kernel,
    saved: Saved,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    link: Link,
    probe: Probe = silent,
) -> Turns[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of this rank's queries, keys and values; keys and values travel again.

    Args:
        plan: the plan of the forward.
        kernel: what computes tiles; it also adds to the gradients of its scores.
        saved: local queries with the results of the forward and the gradient of the output.
        k: local keys.
        v: local values.
        scale: factor on the scores.
        link: what carries the messages; every rank of the group calls.
        probe: is told of the phases.

    Returns:
        dq, dk, dv in the shapes and dtypes of the inputs. Sums over tiles and ranks are in float
        (double for double) and cast once. (As a generator: see [Note: turns].)
    """
    grads = (torch.empty_like(saved.q), torch.empty_like(k), torch.empty_like(v))
    groups = _groups(plan, saved.q, k)
    own = [Pair(k[:, heads.kv], v[:, heads.kv]) for heads in groups]
    fetch = Fetch(plan, own, link, probe)
    fetch.post()
    home: _Home | None = None
    for heads, here in zip(groups, own, strict=True):
        group = _Group(grads, heads, len(plan.rounds), probe)
        rows = Saved(*(x[:, heads.q] for x in saved))
        for index, step in enumerate(plan.rounds):
            buffer = here  # gives up the buffer of the round before
            made = kernel.part(heads.q, plan.queries, step.keys)
            if not index:
                _differentiate(made, step.tiles, rows, buffer, group, group.own, scale)
                continue
            yield
            buffer = fetch.wait()
            fetch.post(buffer)
            received = empty_pair(buffer, step.size, state_dtype(k.dtype))
            sums = RunningSum(received.k), RunningSum(received.v)
            _differentiate(made, step.tiles, rows, buffer, group, sums, scale)
            yield from _settle(home)
            last = index + 1 == len(plan.rounds)
            home = _Home(Homing(step, received, group.own, link, probe), group if last else None)
            del received, sums
        if len(plan.rounds) == 1:
            group.finish()
    yield from _settle(home)
    return grads


class _Group:
    """The gradients of a group of heads while they grow."""

    def __init__(
        self, grads: tuple[Tensor, Tensor, Tensor], heads: Heads, rounds: int, probe: Probe
    ) -> None:
        dq, dk, dv = grads
        self._results = (dq[:, heads.q], dk[:, heads.kv], dv[:, heads.kv])
        dtype = state_dtype(grads[0].dtype, rounds)
        self.probe = probe
        self.dq, *own = (
            RunningSum(x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))
            for x in self._results
        )
        self.own = (own[0], own[1])

    def finish(self) -> None:
        """Round the sums once, where they are of another dtype than the results."""
        self.dq.finish()
        with self.probe("copy"):
            _round_into(self._results, [running.total for running in (self.dq, *self.own)])


def _round_into(results: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    """Results in their own dtype, where they grew in another one."""
    for result, total in zip(results, totals, strict=True):
        if total.dtype != result.dtype:
            result.copy_(total)


class _Home(NamedTuple):
    """Gradients on their way home, and the group that is complete when they are there."""

    homing: Homing
    completes: _Group | None


def _settle(home: _Home | None) -> Turns[None]:
    if home is None:
        return
    yield
    home.homing.add()
    if home.completes is not None:
        home.completes.finish()


def _differentiate(
    kernel: Kernel,
    tiles: Sequence[Tile],
    rows: Saved,
    buffer: Pair,
    group: _Group,
    sums: tuple[RunningSum, RunningSum],
    scale: float,
) -> None:
    parts = kernel.backward(tiles, rows, buffer.k, buffer.v, scale=scale)
    while True:
        with group.probe("kernel"):
            part = next(parts, None)
        if part is None:
            break
        with group.probe("accumulate"):
            tile = part.tile
            group.dq.add(tile.row, tile.q, part.dq)
            sums[0].add(tile.row, tile.k, part.dk)
            sums[1].add(tile.row, tile.k, part.dv)
        del part
    for total in sums:
        total.finish()


def _groups(plan: Plan, q: Tensor, k: Tensor) -> list[Heads]:
    """The heads in as many groups as the plan says, or as there are key heads."""
    kv_heads, ratio = k.shape[1], q.shape[1] // k.shape[1]
    count = min(plan.head_chunks, kv_heads) if len(plan.rounds) > 1 else 1
    edges = [kv_heads * index // count for index in range(count + 1)]
    return [Heads(slice(a * ratio, b * ratio), slice(a, b)) for a, b in pairwise(edges)]


def run(turns: Turns[T]) -> T:
    """Run one rank to its end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: T = end.value
            return found


def together(ranks: Sequence[Turns[T]]) -> list[T]:
    """Run ranks that share a process, in turns; the results in the order of `ranks`."""
    found: dict[int, T] = {}
    while len(found) < len(ranks):
        for index, turns in enumerate(ranks):
            if index not in found:
                try:
                    next(turns)
                except StopIteration as end:
                    found[index] = end.value
    return [found[index] for index in range(len(ranks))]
