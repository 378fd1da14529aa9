"""What plans promise at the sizes of real use: memory, bytes on the wire, error in large groups."""

from itertools import product

import pytest
import torch

from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Saved
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from lightning_cp.plan import Hybrid, Plan, Schedule, build_plan
from tests._harness import oracle
from tests._harness.grid import rare, rotated

HEADS, HEAD_DIM = 8, 64


def plans(mask: Mask, layout: str, exchange: str | Schedule, world: int) -> list[Plan]:
    held = LAYOUTS[layout](mask.q_length, world)
    return [build_plan(held, held, mask, rank=rank, exchange=exchange) for rank in range(world)]


@pytest.mark.parametrize("world", rare([4, 8, 16, 64], [64]))
@pytest.mark.parametrize("exchange", ["ring", "direct"])
def test_buffers_do_not_grow_with_the_group(exchange: str, world: int) -> None:
    length = 32768
    for mask, layout, itemsize in product(
        (Mask.causal(length), Mask.full(length)), LAYOUTS, (2, 4)
    ):
        shard = HEADS * length // world * HEAD_DIM * itemsize
        for plan in plans(mask, layout, exchange, world):
            found = plan.memory(heads=HEADS, head_dim=HEAD_DIM, itemsize=itemsize)
            assert found.forward <= 10 * shard, (mask, layout, itemsize)
            assert found.backward <= 20 * shard, (mask, layout, itemsize)


def moved(mask: Mask, layout: str, exchange: str) -> int:
    """Bytes that a group of four sends in forward and backward."""
    found = 0
    for plan in plans(mask, layout, exchange, 4):
        traffic = plan.traffic(kv_heads=HEADS, head_dim=HEAD_DIM, itemsize=2)
        found += traffic.forward_sent + traffic.backward_sent
    return found


def test_a_window_moves_a_small_part_of_a_rings_bytes() -> None:
    length = 8192
    ring = moved(Mask.causal(length), "zigzag", "ring")
    window = Mask(length, length, window=(511, None))
    assert moved(window, "contiguous", "direct") <= 0.08 * ring
    assert moved(window, "contiguous", "ring") <= 0.08 * ring
    assert moved(window, "zigzag", "direct") <= 0.16 * ring
    every_shard = moved(Mask.full(length), "zigzag", "ring")
    assert moved(window, "zigzag", "direct") <= 0.15 * every_shard


def test_direct_moves_no_more_than_the_ring() -> None:
    for mask in (Mask.causal(8192), Mask.packed((0, 100, 5000, 5001, 8192))):
        for layout in LAYOUTS:
            assert moved(mask, layout, "direct") <= moved(mask, layout, "ring")


def errors(world: int, exchange: str | Schedule, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors of out, dq, dk and dv in a group over those of one device: largest, and root mean."""
    length, heads = 512, 2
    mask, layout = Mask.causal(length), LAYOUTS["zigzag"](length, world)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, length, 32, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(4)
    )
    kernel, boxes, scale = KERNELS["sdpa"], Mailboxes(), 0.2
    cut = [[layout.shard(x, rank=r, dim=2) for x in (q, k, v, grad)] for r in range(world)]
    group = plans(mask, "zigzag", exchange, world)
    calls = [executor.Call(kernel, scale, boxes.link(rank)) for rank in range(world)]
    outs = executor.together(
        [
            executor.forward(plan, call, *x[:3])
            for plan, call, x in zip(group, calls, cut, strict=True)
        ]
    )
    saved = [Saved(x[0], out, lse, x[3]) for x, (out, lse) in zip(cut, outs, strict=True)]
    grads = executor.together(
        [
            executor.backward(plan, call, s, *x[1:3])
            for plan, call, x, s in zip(group, calls, cut, saved, strict=True)
        ]
    )
    parts = [[out for out, _ in outs], *map(list, zip(*grads, strict=True))]
    found = [layout.unshard(part, dim=2) for part in parts]
    exact = oracle.attention(q, k, v, grad, mask, scale=scale)
    single = oracle.single_device(q, k, v, grad, mask, scale=scale)
    ratios = []
    for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True):
        ours, theirs = (y.double() - getattr(exact, name) for y in (x, getattr(single, name)))
        ratios.append(
            (float(ours.abs().max() / theirs.abs().max()), float(ours.norm() / theirs.norm()))
        )
    return ratios


@pytest.mark.parametrize(
    ("exchange", "dtype"),
    rotated(
        ("ring", "direct", "allgather", Hybrid(2)),
        [(torch.float32,), (torch.bfloat16,)],
        rare=("ring", "direct"),
    ),
    ids=str,
)
def test_error_is_flat_up_to_64_ranks(exchange: str | Schedule, dtype: torch.dtype) -> None:
    found = {world: errors(world, exchange, dtype) for world in (2, 8, 16, 64)}
    assert max(largest for ratios in found.values() for largest, _ in ratios) <= 2, found
    for world in (8, 16, 64):
        for few, many in zip(found[2], found[world], strict=True):
            assert many[1] <= 1.2 * few[1], found
