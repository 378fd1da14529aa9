"""The exchange in which every rank computes all: the same bits whatever the group."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.scores import PerHead, Scores
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from lightning_cp.plan import Plan, Replicated, Traffic, build_plan
from tests._harness import turns

LENGTH = 301
MASKS = (
    Mask.causal(LENGTH),
    Mask.full(LENGTH),
    Mask.packed((0, 1, 90, 90, 200, LENGTH)),
    Mask(LENGTH, LENGTH, keys=((3, LENGTH), (0, 250)), window=(70, None)),
)


def plans(mask: Mask, layout: str, world: int) -> list[Plan]:
    held = LAYOUTS[layout](mask.q_length, world)
    return [build_plan(held, held, mask, rank=r, exchange=Replicated()) for r in range(world)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_the_same_bits_for_1_2_4_and_8_ranks(mask: Mask, dtype: torch.dtype) -> None:
    inputs = turns.tensors(LENGTH, heads=(3, 1), head_dims=(16, 16), dtype=dtype)
    kernel = KERNELS["sdpa"]
    alone = turns.run(turns.group(1, "direct", "contiguous", mask), kernel, inputs)
    for world, layout in ((1, "zigzag"), *product((2, 4, 8), ("contiguous", "zigzag"))):
        found = turns.run(turns.group(world, Replicated(), layout, mask), kernel, inputs)
        for name, x, y in zip(alone._fields, alone, found, strict=True):
            assert torch.equal(x, y), f"{name}, {world} ranks, {layout}"


def learned(world: int, layout: str) -> list[Tensor]:
    """Gradients of slopes and of a table, the sum over ranks."""
    mask = Mask.causal(LENGTH)
    held = LAYOUTS[layout](LENGTH, world)
    q, k, v, grad = turns.tensors(LENGTH, heads=(4, 2))
    per_head = PerHead(
        None, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.linspace(-1, 1, 20).view(4, 5)
    )
    boxes, scores, kernels = Mailboxes(), [], []
    for _ in range(world):
        scores.append(Scores(per_head=per_head, grads=per_head.zeros(torch.float64)))
        kernels.append(KERNELS["reference"].bound(scores[-1]))
    parts = [[held.shard(x, rank=r, dim=2) for x in (q, k, v, grad)] for r in range(world)]
    calls = [executor.Call(kernel, 0.3, boxes.link(rank)) for rank, kernel in enumerate(kernels)]
    ranks = list(zip(plans(mask, layout, world), calls, parts, strict=True))
    outs = executor.together([executor.forward(p, call, *x[:3]) for p, call, x in ranks])
    executor.together(
        [
            executor.backward(p, call, Saved(x[0], *out, x[3]), *x[1:3])
            for (p, call, x), out in zip(ranks, outs, strict=True)
        ]
    )
    each = [[x for x in s.grads if x is not None] for s in scores]
    return [torch.stack(grads).sum(0) for grads in zip(*each, strict=True)]


def test_what_a_call_learns_is_counted_once() -> None:
    alone = learned(1, "contiguous")
    assert len(alone) == 2
    for world, layout in product((2, 3), ("contiguous", "zigzag")):
        for expected, found in zip(alone, learned(world, layout), strict=True):
            assert torch.equal(expected, found)


def test_bytes_by_hand() -> None:
    first, second = plans(Mask.causal(12), "contiguous", 2)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "itemsize": 2, "batch": 3}
    tensors = 6 * 3 * 2 * (4 * 8 + 2 * 2 * 8)  # q, k and v of six tokens
    again = tensors + 6 * 3 * 4 * (2 * 8 * 2 + 4)  # with output, its gradient and LSE
    assert (
        first.traffic(**sizes) == second.traffic(**sizes) == Traffic(tensors, tensors, again, again)
    )
    assert first.work() == second.work() == 12 * 13 // 2
    assert first.own_heads(4, 2) == (4, 2)


def test_dropout_is_refused_and_few_heads_are_not() -> None:
    (plan, _) = plans(MASKS[0], "zigzag", 2)
    assert plan.rejects(1) is None
    assert "would drop other weights of it" in (plan.rejects(1, dropout=True) or "")
