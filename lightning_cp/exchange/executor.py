"""The loop that runs a plan, forward and backward. It owns no decisions.

Legend: B batch, H query heads, Hk key heads, S local queries, D head size.

[Note: turns] Forward and backward are generators that give way before every wait for messages, and
say for which. One rank runs its own to the end; ranks that share a process take turns, see
`together`.
"""

from collections.abc import Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_cp.comm.p2p import Link, Waiting
from lightning_cp.exchange import switched
from lightning_cp.exchange.probe import Probe, silent
from lightning_cp.exchange.running import RunningAttention, RunningSum
from lightning_cp.exchange.transfers import Fetch, Homing, Pair, empty_pair
from lightning_cp.kernels import Kernel
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.plan import Heads, Plan, Round, Tile

T = TypeVar("T")
Turns = Generator[Waiting, None, T]


class Call(NamedTuple):
    """What all rounds of an attention call share.

    Attributes:
        kernel: what computes tiles, with the scores of the call; in a backward it also adds to the
            gradients of its scores.
        scale: factor on the scores.
        link: what carries the messages; every rank of the group calls.
        probe: is told of the phases.
    """

    kernel: Kernel
    scale: float
    link: Link
    probe: Probe = silent

    def part(self, heads: Heads, plan: Plan, step: Round) -> "Call":
        """The same for some heads of the call, and the rows of a round."""
        made = self.kernel.part(slice(*heads.q), plan.queries, step.keys)
        return self._replace(kernel=made)


def token_major(q: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """An empty `[B, H, S, D]` stored as `[B, S, H, D]`, as torch's own kernels return it."""
    batch, heads, size, _ = q.shape
    return q.new_empty(batch, size, heads, head_dim, dtype=dtype).transpose(1, 2)


def rowless(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of no tokens, which stand for those that were kept."""
    made = (x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (q, k, v))
    return next(made), next(made), next(made)


def forward(
    plan: Plan, call: Call, q: Tensor, k: Tensor, v: Tensor, *, kept: list[Tensor] | None = None
) -> Turns[tuple[Tensor, Tensor]]:
    """Attention of this rank's queries over the keys of the whole group.

    Args:
        plan: this rank's plan.
        call: what all rounds share.
        q: local queries `[B, H, S, D]`.
        k: local keys `[B, Hk, Sk, D]`.
        v: local values `[B, Hk, Sk, Dv]`.
        kept: where a backward will follow: gets the queries, keys and values that heads were
            swapped for, as far as the plan keeps them; see `Switch.keeps`.

    Returns:
        Output `[B, H, S, Dv]` in the dtype of `q`, and LSE `[B, H, S]` in float (double for
        double), -inf and output 0 where a query sees no key. (As a generator: see [Note: turns].)
    """
    if plan.switch is None:
        return (yield from _forward(plan, call, _groups(plan, q, k), q, k, v))
    results = _results(q, v)
    attend = partial(_forward, plan, call)
    yield from switched.forward(
        plan, attend, (q, k, v), results, link=call.link, probe=call.probe, kept=kept
    )
    return results


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = token_major(q, v.shape[-1], q.dtype)
    return out, q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _forward(
    plan: Plan, call: Call, groups: Sequence[Heads], q: Tensor, k: Tensor, v: Tensor
) -> Turns[tuple[Tensor, Tensor]]:
    """All rounds of a plan, one group of heads of the call after the other.

    The tensors begin with the first head of the first group; the key heads of a group serve
    equally many query heads each.
    """
    dtype = state_dtype(q.dtype, len(plan.rounds))
    out, lse = _results(q, v)
    own = [_keys(heads.within(groups[0]), k, v) for heads in groups]
    fetch = Fetch(plan, own, call.link, call.probe)
    fetch.post()
    for heads, here in zip(groups, own, strict=True):
        some = slice(*heads.within(groups[0]).q)
        results, queries = (out[:, some], lse[:, some]), q[:, some]
        running = RunningAttention(*results, dtype, several=len(plan.rounds) > 1)
        for index, step in enumerate(plan.rounds):
            buffer = here  # gives up the buffer of the round before
            if index:
                yield fetch.pending
                buffer = fetch.wait()
                fetch.post(buffer)
            made = call.part(heads, plan, step)
            _attend(made, step.tiles, queries, buffer, running)
        del buffer
        running.finish()
        running.sink(call.kernel.scores.per_head.of(slice(*heads.q)).sinks)
        with call.probe("copy"):
            _round_into(results, (running.out, running.lse))
        del running
    return out, lse


def _attend(
    call: Call, tiles: Sequence[Tile], q: Tensor, buffer: Pair, running: RunningAttention
) -> None:
    parts = call.kernel.forward(tiles, q, buffer.k, buffer.v, scale=call.scale)
    while True:
        with call.probe("kernel"):
            part = next(parts, None)
        if part is None:
            return
        with call.probe("merge"):
            running.add(part)
        del part


def backward(
    plan: Plan, call: Call, saved: Saved, k: Tensor, v: Tensor, *, kept: Sequence[Tensor] = ()
) -> Turns[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of this rank's queries, keys and values; keys and values travel again.

    Args:
        plan: the plan of the forward.
        call: what all rounds share.
        saved: local queries with the results of the forward and the gradient of the output.
        k: local keys.
        v: local values.
        kept: what the forward kept; where that is something, queries, keys and values may be
            `rowless`.

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k and v. Sums over tiles and ranks are in float
        (double for double) and cast once. (As a generator: see [Note: turns].)
    """
    if plan.switch is None:
        groups = _groups(plan, saved.q, k)
        return (yield from _backward(plan, call, groups, saved, k, v, dtype=k.dtype))
    differentiate = partial(_backward, plan, call)
    grads = yield from switched.backward(
        plan, differentiate, (saved, k, v), link=call.link, probe=call.probe, kept=kept
    )
    if plan.switch.replicated and plan.switch.index:
        for x in call.kernel.scores.grads:  # the first member has found those of all tokens
            if x is not None:
                x.zero_()
    return grads


def _backward(
    plan: Plan,
    call: Call,
    groups: Sequence[Heads],
    saved: Saved,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype,
) -> Turns[tuple[Tensor, Tensor, Tensor]]:
    """All rounds of a plan, see `_forward`; dk and dv are of `dtype`."""
    dk, dv = (torch.empty_like(x, dtype=dtype) for x in (k, v))
    grads = (torch.empty_like(saved.q), dk, dv)
    own = [_keys(heads.within(groups[0]), k, v) for heads in groups]
    fetch = Fetch(plan, own, call.link, call.probe)
    fetch.post()
    home: _Home | None = None
    for heads, here in zip(groups, own, strict=True):
        local = heads.within(groups[0])
        group = _Group(grads, local, len(plan.rounds), call.probe)
        rows = Saved(*(x[:, slice(*local.q)] for x in saved))
        for index, step in enumerate(plan.rounds):
            buffer = here  # gives up the buffer of the round before
            made = call.part(heads, plan, step)
            if not index:
                _differentiate(made, step.tiles, rows, buffer, group, group.own)
                continue
            yield fetch.pending
            buffer = fetch.wait()
            fetch.post(buffer)
            received = empty_pair(buffer, step.size, state_dtype(k.dtype))
            sums = RunningSum(received.k), RunningSum(received.v)
            _differentiate(made, step.tiles, rows, buffer, group, sums)
            yield from _settle(home)
            last = index + 1 == len(plan.rounds)
            homing = Homing(
                step,
                received,
                group.own,
                wire=k.dtype if plan.half_grads else state_dtype(k.dtype),
                link=call.link,
                probe=call.probe,
            )
            home = _Home(homing, group if last else None)
            del received, sums, homing
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
        q, kv = slice(*heads.q), slice(*heads.kv)
        self._results = (dq[:, q], dk[:, kv], dv[:, kv])
        dtype = state_dtype(grads[0].dtype, rounds)
        self.probe = probe
        self.dq, *own = (RunningSum(x, dtype, several=rounds > 1) for x in self._results)
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
    yield home.homing.pending
    home.homing.add()
    if home.completes is not None:
        home.completes.finish()


def _differentiate(
    call: Call,
    tiles: Sequence[Tile],
    rows: Saved,
    buffer: Pair,
    group: _Group,
    sums: tuple[RunningSum, RunningSum],
) -> None:
    parts = call.kernel.backward(tiles, rows, buffer.k, buffer.v, scale=call.scale)
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
    return [Heads((a * ratio, b * ratio), (a, b)) for a, b in pairwise(edges)]


def _keys(heads: Heads, k: Tensor, v: Tensor) -> Pair:
    some = slice(*heads.kv)
    return Pair(k[:, some], v[:, some])


def run(turns: Turns[T]) -> T:
    """Run one rank to its end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: T = end.value
            return found


def together(ranks: Sequence[Turns[T]]) -> list[T]:
    """Run ranks that share a process, in turns; the results in the order of `ranks`.

    A rank goes on when its messages are there. Where no rank's are, one goes on nevertheless, and
    its wait says what is missing.
    """
    found: dict[int, T] = {}
    waits: dict[int, Waiting] = {}
    while len(found) < len(ranks):
        left = [index for index in range(len(ranks)) if index not in found]
        able = [index for index in left if index not in waits or waits[index].ready]
        for index in able or left[:1]:
            try:
                waits[index] = next(ranks[index])
            except StopIteration as end:
                found[index] = end.value
    return [found[index] for index in range(len(ranks))]
