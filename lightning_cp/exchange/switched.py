"""A call whose ranks swap heads for tokens: fetch, compute a part of the heads, give back.

While one portion of the heads is computed the next one arrives and the results of the one before
leave. What a portion computes is a call of its own, on the tokens of the block.

Legend: B batch, H query heads, Hk key heads, S local queries, D head size.
"""

from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_cp.comm.p2p import Link, Waiting
from lightning_cp.exchange.probe import Probe
from lightning_cp.exchange.switching import Fetching, Returning, Side, room
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.plan import Heads, Plan, Switch, uniform

Turns = Generator[Waiting, None, Sequence[Tensor]]


class Forward(Protocol):
    """Output and LSE of groups of heads of the call; the tensors begin with the first of them."""

    def __call__(self, groups: Sequence[Heads], q: Tensor, k: Tensor, v: Tensor) -> Turns: ...


class Backward(Protocol):
    """dq, dk and dv of groups of heads of the call, the last two in a dtype."""

    def __call__(
        self, groups: Sequence[Heads], saved: Saved, k: Tensor, v: Tensor, *, dtype: torch.dtype
    ) -> Turns: ...


def forward(
    plan: Plan,
    attend: Forward,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    *,
    link: Link,
    probe: Probe,
    kept: list[Tensor] | None = None,
) -> Generator[Waiting, None, None]:
    """Attention of this rank's queries, all heads.

    Args:
        plan: this rank's plan, with a switch.
        attend: computes some heads of the tokens of the block.
        inputs: local q, k and v.
        results: output `[B, H, S, Dv]` and LSE `[B, H, S]` to fill.
        link: what carries the messages; every rank of the group calls.
        probe: is told of the phases.
        kept: gets the inputs of every portion, where `Switch.keeps` them.
    """
    switch, portions, ratio = _portions(plan, inputs[0], inputs[1])
    if not switch.keeps(inputs[0].shape[1], inputs[1].shape[1]):
        kept = None
    out, lse = results
    sides = [Side(inputs[0]), Side(inputs[1], True), Side(inputs[2], True)]
    targets = [Side(lse), Side(out)]
    coming = Fetching(switch, sides, portions[0], link, probe)
    home: Returning | None = None
    for at, own in enumerate(portions):
        yield coming.pending
        q, k, v = coming.wait()
        if at + 1 < len(portions):
            coming = Fetching(switch, sides, portions[at + 1], link, probe)
        here = own[switch.index]
        found = yield from attend(uniform(here, ratio), q, k, v)
        if kept is not None:
            kept += (q, k, v)
        del q, k, v
        if home is not None:
            yield home.pending
            home.add()
        home = Returning(switch, found[::-1], targets, own, link=link, probe=probe)
        del found
    assert home is not None  # invariant: there is a portion
    yield home.pending
    home.add()


def backward(
    plan: Plan,
    differentiate: Backward,
    inputs: tuple[Saved, Tensor, Tensor],
    *,
    link: Link,
    probe: Probe,
    kept: Sequence[Tensor] = (),
) -> Generator[Waiting, None, tuple[Tensor, Tensor, Tensor]]:
    """Gradients of this rank's queries, keys and values; inputs that were not kept travel again.

    Args:
        plan: the plan of the forward.
        differentiate: computes some heads of the tokens of the block.
        inputs: local queries with the results of the forward, local keys, local values.
        link: what carries the messages; every rank of the group calls.
        probe: is told of the phases.
        kept: what the forward kept; then the inputs may be without rows.

    Returns:
        dq, dk, dv of this rank's tokens, in the dtypes of q, k and v.
    """
    saved, k, v = inputs
    switch, portions, ratio = _portions(plan, saved.q, k)
    shared = switch.shared(saved.q.shape[1], k.shape[1])
    dtype = state_dtype(k.dtype) if shared else k.dtype
    dq = room(saved.q, plan.q_size)
    dk, dv = (room(x, plan.kv_size, dtype=dtype, zeros=shared) for x in (k, v))
    sides = [*map(Side, (saved.lse, saved.out, saved.grad_out))]
    if not kept:
        sides += [Side(saved.q), Side(k, True), Side(v, True)]
    targets = [Side(dk, True), Side(dv, True), Side(dq)]
    wire = k.dtype if plan.half_grads else None
    back = partial(Returning, switch, summed=shared, wire=wire, link=link, probe=probe)
    coming = Fetching(switch, sides, portions[0], link, probe)
    home: Returning | None = None
    for at, own in enumerate(portions):
        yield coming.pending
        lse, out, grad_out, *given = coming.wait()
        queries, keys, values = given or kept[3 * at : 3 * at + 3]
        if at + 1 < len(portions):
            coming = Fetching(switch, sides, portions[at + 1], link, probe)
        here = own[switch.index]
        block = Saved(queries, out, lse, grad_out)
        del lse, out, grad_out, given, queries
        found = yield from differentiate(uniform(here, ratio), block, keys, values, dtype=dtype)
        del block, keys, values
        if home is not None:
            yield home.pending
            home.add()
        home = back([*found[1:], found[0]], targets, own)
        del found
    assert home is not None  # invariant: there is a portion
    yield home.pending
    home.add()
    with probe("copy"):
        return dq, dk.to(k.dtype), dv.to(k.dtype)


def _portions(
    plan: Plan, q: Tensor, k: Tensor
) -> tuple[Switch, tuple[tuple[Heads, ...], ...], int]:
    """The switch, heads by portion and member, and query heads for a key head."""
    switch, heads, kv_heads = plan.switch, q.shape[1], k.shape[1]
    assert switch is not None  # invariant: the caller asked
    return switch, switch.portions(heads, kv_heads, plan.head_chunks), heads // kv_heads
