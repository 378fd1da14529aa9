"""The memory of an attention call: what the plan says, and that it does not grow with the group."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.p2p import GroupLink
from lightning_cp.diagnostics.trace import MemoryTracker
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Saved
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from lightning_cp.plan import (
    SCHEDULES,
    Direct,
    Hybrid,
    Memory,
    Replicated,
    Ring,
    Schedule,
    Ulysses,
    build_plan,
)
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist


class Case(NamedTuple):
    """One attention call of a group."""

    exchange: str | Schedule
    layout: str
    mask: Mask
    dtype: torch.dtype
    heads: tuple[int, int] = (4, 4)
    head_dim: int = 32
    value_dim: int = 32
    keep: bool = False

    def plan(self, rank: int, world: int) -> object:
        layout = LAYOUTS[self.layout](self.mask.q_length, world)
        return build_plan(layout, layout, self.mask, rank=rank, exchange=self.exchange)


LENGTH = 2304
EDGES = (0, 400, 900, 901, 1800, LENGTH)
MASKS = (
    Mask.causal(LENGTH),
    Mask.full(LENGTH),
    Mask.packed(EDGES),
    Mask(LENGTH, LENGTH, window=(350, None)),
)
CASES = [
    Case(exchange, layout, mask, dtype)
    for exchange, layout, mask, dtype in product(
        sorted(SCHEDULES), ("contiguous", "zigzag"), MASKS, (torch.bfloat16, torch.float32)
    )
]
CASES.append(Case("direct", "zigzag", MASKS[0], torch.bfloat16, heads=(8, 2)))
CASES.append(Case("ring", "zigzag", MASKS[0], torch.bfloat16, heads=(4, 1)))
OPTIONS = [
    Case("ulysses", "zigzag", MASKS[0], torch.bfloat16, heads=(8, 2)),
    Case(Replicated(), "zigzag", MASKS[0], torch.bfloat16, heads=(4, 2)),
    Case(Replicated(), "contiguous", MASKS[2], torch.float32),
    Case("ulysses", "contiguous", MASKS[2], torch.float32, heads=(6, 3)),
    Case(Ulysses(half_grads=True), "zigzag", MASKS[1], torch.bfloat16, heads=(4, 1)),
    Case(Hybrid(2, "ring"), "zigzag", MASKS[0], torch.bfloat16, heads=(6, 2)),
    Case(Hybrid(2, half_grads=True), "contiguous", MASKS[3], torch.bfloat16, heads=(6, 2)),
    Case(Direct(half_grads=True), "zigzag", MASKS[1], torch.bfloat16),
    Case(Ring(half_grads=True), "contiguous", MASKS[0], torch.bfloat16),
]
OPTIONS += [case._replace(keep=True) for case in OPTIONS]
CASES += [
    Case("direct", "zigzag", MASKS[0], dtype, (4, 4), *sizes)
    for dtype, sizes in product((torch.float32, torch.bfloat16), ((48, 32), (32, 48)))
]


def run_measured(rank: int, world: int, cases: list[Case]) -> list[tuple[Memory, Memory]]:
    """What the plan says and what was counted."""
    found = []
    for case in cases:
        plan = case.plan(rank, world)
        heads, kv_heads = case.heads
        shapes = (heads, plan.q_size), (kv_heads, plan.kv_size)
        q, k = (torch.randn(1, *shape, case.head_dim).to(case.dtype) for shape in shapes)
        grad, v = (torch.randn(1, *shape, case.value_dim).to(case.dtype) for shape in shapes)
        call = executor.Call(KERNELS["sdpa"], 0.1, GroupLink(dist.group.WORLD))
        kept: list[Tensor] = []
        with MemoryTracker() as forward:
            turns = executor.forward(plan, call, q, k, v, kept=kept if case.keep else None)
            out, lse = executor.run(turns)
        saved = Saved(q, out, lse, grad)
        with MemoryTracker() as backward:
            executor.run(executor.backward(plan, call, saved, k, v, kept=kept))
        said = plan.memory(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=case.head_dim,
            value_dim=case.value_dim,
            itemsize=q.itemsize,
            kept=case.keep,
        )
        found.append((said, Memory(forward.peak, backward.peak)))
    return found


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_peak_is_what_the_plan_says(world: int, every: int, pool: Pool) -> None:
    cases = CASES[(world - 1) % every :: every] + (OPTIONS if world in (2, 4) else [])
    for rank, found in enumerate(pool.run(run_measured, cases, world=world, timeout=100)):
        for case, (said, counted) in zip(cases, found, strict=True):
            where = f"rank {rank} of {world}: {case}"
            assert counted.forward == pytest.approx(said.forward, rel=0.1), where
            assert counted.backward == pytest.approx(said.backward, rel=0.1), where
