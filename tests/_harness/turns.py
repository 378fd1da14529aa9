"""A whole group in one process: every rank's plan in turn, on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels.base import Kernel, Saved
from lightning_cp.kernels.merge import merge_, state_dtype
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan import Schedule, Tile, build_plan
from tests._harness import oracle
from tests._harness.cases import LAYOUT_MAKERS
from tests._harness.tolerance import assert_as_accurate

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Whole q, k, v and the gradient of the output."""


@dataclass(frozen=True)
class Group:
    """Ranks that share a sequence, and what its tokens see."""

    world: int
    exchange: str | Schedule
    layout: Layout
    mask: Mask
    scale: float


def group(
    world: int, exchange: str | Schedule, layout: str, mask: Mask, scale: float = 0.3
) -> Group:
    """A group with a layout by its name."""
    return Group(world, exchange, LAYOUT_MAKERS[layout](mask.q_length, world), mask, scale)


def tensors(
    length: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random q, k, v and gradient of the output of a whole sequence."""
    generator = torch.Generator().manual_seed(length)
    (h, hk), (d, dv) = heads, head_dims
    q, k, v, grad = (
        torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((h, length, d), (hk, length, d), (hk, length, dv), (h, length, dv))
    )
    return q, k, v, grad


def run(group: Group, kernel: Kernel, inputs: Inputs) -> oracle.Answer:
    """What the ranks compute of whole q, k, v and gradient, on the device of these."""
    ranks, layout, scale = range(group.world), group.layout, group.scale
    plans = [
        build_plan(layout, layout, group.mask, rank=rank, exchange=group.exchange) for rank in ranks
    ]
    shards = [[layout.shard(x, rank=rank, dim=2) for x in inputs] for rank in ranks]
    boxes = Mailboxes()
    calls = [executor.Call(kernel, scale, boxes.link(rank)) for rank in ranks]
    kept: list[list[Tensor]] = [[] for _ in ranks]
    outs = executor.together(
        [
            executor.forward(plan, call, q, k, v, kept=own)
            for plan, call, own, (q, k, v, _) in zip(plans, calls, kept, shards, strict=True)
        ]
    )
    assert boxes.empty
    grads = executor.together(
        [
            executor.backward(plan, call, Saved(q, *out, grad), k, v, kept=own)
            for plan, call, own, (q, k, v, grad), out in zip(
                plans, calls, kept, shards, outs, strict=True
            )
        ]
    )
    assert boxes.empty
    of_ranks = [(*out, *grad) for out, grad in zip(outs, grads, strict=True)]
    return oracle.Answer(*(layout.unshard(x, dim=2) for x in zip(*of_ranks, strict=True)))


def run_tile(kernel: Kernel, tile: Tile, inputs: Inputs, scale: float) -> oracle.Answer:
    """One tile as the executor runs it: split, merged, and differentiated with the global LSE."""
    q, k, v, grad = inputs
    dtype = state_dtype(q.dtype)
    out = torch.zeros(grad.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    for part in kernel.forward([tile], q, k, v, scale=scale):
        a, b = part.tile.q
        merge_(out[:, :, a:b], lse[:, :, a:b], part.out, part.lse)
    out = out.to(q.dtype)
    sums = [torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v)]
    for found, *grads in kernel.backward([tile], Saved(q, out, lse, grad), k, v, scale=scale):
        for total, (low, high), x in zip(sums, (found.q, found.k, found.k), grads, strict=True):
            total[:, :, low:high] += x
    dq, dk, dv = (x.to(q.dtype) for x in sums)
    return oracle.Answer(out, lse, dq, dk, dv)


def assert_right(group: Group, kernel: Kernel, inputs: Inputs, device: str = "cpu") -> None:
    """A group on `device` must be as accurate as one CPU kernel of the dtype is."""
    q, k, v, grad = (x.to(device) for x in inputs)
    found = run(group, kernel, (q, k, v, grad))
    truth = oracle.attention(*inputs, group.mask, scale=group.scale)
    baseline = None
    if inputs[0].dtype != torch.float64:
        baseline = oracle.single_device(*inputs, group.mask, scale=group.scale)
    for name in oracle.Answer._fields:
        plain = None if baseline is None else getattr(baseline, name)
        got = getattr(found, name).cpu()
        assert_as_accurate(got, getattr(truth, name), plain, where=name)
