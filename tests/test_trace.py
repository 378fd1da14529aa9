"""The trackers, on examples worked out by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_cp import attend
from lightning_cp.context import SLOT, Context
from lightning_cp.diagnostics.trace import CollectiveCall, CollectiveRecorder, MemoryTracker
from lightning_cp.layout import contiguous
from lightning_cp.plan import Ring
from lightning_cp.sequences import Sequence
from lightning_cp.swap import Installation
from tests._harness.pool import Pool

COUNT, BYTES = 1024, 4096
"""A parameter of so many floats, and the bytes of a tensor like it."""


def test_peak_of_a_small_step() -> None:
    parameter = nn.Parameter(torch.ones(COUNT))
    tracker = MemoryTracker([parameter])
    with tracker:
        x = parameter * 2
        assert tracker.current == BYTES
        y = x.exp()
        assert (tracker.current, tracker.peak) == (2 * BYTES, 2 * BYTES)
        del x  # not needed by the backward
        assert tracker.current == BYTES
        view = y.view(2, -1)[0]
        assert tracker.current == BYTES, "a view is no new memory"
        loss = y.sum()
        assert tracker.current == BYTES + 4
        del y, view
        # exp's backward: y, its own gradient, and two scalars, the loss and the loss's gradient.
        loss.backward()
        assert tracker.peak == 2 * BYTES + 8
        assert tracker.current == 4, "the gradient of the parameter is no activation"
    assert parameter.grad is not None
    tracker.close()


def test_gradients_of_a_second_step_do_not_count() -> None:
    parameter = nn.Parameter(torch.ones(COUNT))
    tracker = MemoryTracker([parameter])
    for step in range(1, 3):
        with tracker:
            (parameter * 2).sum().backward()
        assert tracker.current == 0, f"step {step}"
        assert parameter.grad is not None
        assert parameter.grad[0].item() == 2 * step
    # One step: the product, then its gradient next to the gradient of the loss.
    assert tracker.peak <= BYTES + 8
    tracker.close()


def test_without_its_parameters_a_gradient_counts() -> None:
    parameter = nn.Parameter(torch.ones(COUNT))
    with MemoryTracker() as tracker:
        (parameter * 2).sum().backward()
    assert tracker.current == BYTES


def test_closing_takes_the_hooks_away() -> None:
    parameter = nn.Parameter(torch.ones(2))
    tracker = MemoryTracker([parameter])
    with tracker:
        parameter.sum().backward()
    tracker.close()
    assert not parameter._post_accumulate_grad_hooks


def test_what_existed_before_does_not_count() -> None:
    batch = torch.ones(COUNT)
    with MemoryTracker() as tracker:
        batch.view(2, -1).add_(1)
        assert tracker.peak == 0
        copy = batch.clone()
        assert tracker.current == BYTES
        del copy
        assert tracker.current == 0
    assert tracker.peak == BYTES


def test_memory_inside_the_attention_operator_counts() -> None:
    size, heads, width = 64, 2, 4
    q = torch.ones(1, heads, size, width, requires_grad=True)
    context = Context(
        rank=0,
        world=1,
        group=None,
        meta=None,
        sequences={"s": Sequence(layout=contiguous(size, 1), length=size, batch=1)},
        exchange="ring",
        kernel="reference",
    )
    scores = 4 * heads * size * size
    with SLOT.activate(context), MemoryTracker() as tracker:
        out = attend(q, q, q)
        assert 2 * scores <= tracker.peak <= 5 * scores
        # What stays: output and LSE, and nothing of the scores.
        kept = 4 * heads * size * width + 4 * heads * size
        assert tracker.current == kept
        with MemoryTracker() as backward:
            out.sum().backward()
    assert 2 * scores <= backward.peak <= 5 * scores
    assert q.grad is not None
    assert backward.current == q.grad.nbytes


def run_recorder(rank: int, world: int) -> list[list[CollectiveCall]]:
    """Attention forward and backward, a swapped loss with its backward, and calls of a user."""
    length, heads, width = 4 * world, 2, 3
    context = Context(
        rank=rank,
        world=world,
        group=dist.group.WORLD,
        meta=None,
        sequences={"s": Sequence(layout=contiguous(length, world), length=length, batch=1)},
        exchange=Ring(head_chunks=1),
    )
    found = []
    q = torch.ones(1, heads, 4, width, dtype=torch.float64, requires_grad=True)
    with SLOT.activate(context):
        with CollectiveRecorder() as recorder:
            out = attend(q, q, q)
        found.append(recorder.calls)
        with CollectiveRecorder() as recorder:
            out.sum().backward()
        found.append(recorder.calls)
        installation = Installation()
        try:
            logits = torch.ones(4, 2, requires_grad=True)
            with CollectiveRecorder() as recorder:
                F.cross_entropy(logits, torch.tensor([0, 1, 1, 0])).backward()
            found.append(recorder.calls)
        finally:
            installation.remove()
    with CollectiveRecorder() as recorder:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=torch.float64), src=0)
        torch.ones(2).sum()
    found.append(recorder.calls)
    assert recorder.total("allreduce_") == 12
    assert recorder.total("allreduce_", "broadcast_") == 28
    assert recorder.total("send") == 0
    assert {call.group for calls in found for call in calls} <= {dist.group.WORLD.group_name}
    return [[call._replace(group="") for call in calls] for calls in found]


@pytest.mark.dist
def test_recorder_sees_every_call_in_order(pool: Pool) -> None:
    shard = 2 * 2 * 4 * 3 * 8  # keys and values, heads, tokens, head size, bytes
    exchange = [CollectiveCall("send", shard), CollectiveCall("recv_", shard)]
    for forward, backward, loss, mine in pool.run(run_recorder, world=3):
        assert forward == exchange * 2
        # Each round fetches keys and values again and sends gradients home.
        assert sorted(backward) == sorted(exchange * 4)
        assert loss == [CollectiveCall("allreduce_", 8), CollectiveCall("allreduce_", 4)]
        assert mine == [CollectiveCall("allreduce_", 12), CollectiveCall("broadcast_", 16)]


@pytest.mark.dist
def test_one_rank_sends_nothing(pool: Pool) -> None:
    ((forward, backward, loss, _),) = pool.run(run_recorder, world=1)
    assert forward == backward == []
    assert [call.name for call in loss] == ["allreduce_", "allreduce_"]
