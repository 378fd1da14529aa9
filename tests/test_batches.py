"""The messages of whole groups against the rules of a communicator that runs one batch at a time.

gloo hides all of these: there is one batch a round and direction, every buffer is contiguous and
holds something, a pair of ranks agrees on sizes and their order, and no order of the batches can
wait in a circle.
"""

from collections import defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_cp.cli.bench.fuzz.cases import Case, draw
from lightning_cp.comm import p2p
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Saved
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES, Plan, build_plan


class Operation(NamedTuple):
    """A send or a receive, as `P2POp` would be."""

    op: Any
    tensor: Tensor
    group: int
    group_peer: int


class Work:
    """A receive that takes its message when it is waited for; a send has nothing to wait for."""

    def __init__(self, boxes: Mailboxes, operation: Operation) -> None:
        self._boxes, self._operation = boxes, operation

    def wait(self) -> None:
        if self._operation.op == "irecv":
            op = self._operation
            op.tensor.copy_(self._boxes.take(op.group_peer, op.group, "keys"))


class FakeGroups:
    """Stands in for `torch.distributed` of ranks that share a process; a group is its rank.

    Attributes:
        batches: for every rank its batches, each a list of (send or receive, peer, bytes).
    """

    isend, irecv, P2POp = "isend", "irecv", Operation

    def __init__(self) -> None:
        self.batches: dict[int, list[list[tuple[str, int, int]]]] = defaultdict(list)
        self._boxes = Mailboxes()

    def batch_isend_irecv(self, operations: list[Operation]) -> list[Work]:
        assert operations, "an empty batch"
        (rank,) = {op.group for op in operations}
        for kind in ("isend", "irecv"):
            peers = [op.group_peer for op in operations if op.op == kind]
            assert len(set(peers)) == len(peers), f"several {kind} between one pair in a batch"
            assert rank not in peers
        for op in operations:
            assert op.tensor.is_contiguous()
            assert op.tensor.numel() > 0
            if op.op == "isend":
                self._boxes.leave(rank, op.group_peer, op.tensor, "keys")
        assert len({op.tensor.dtype for op in operations}) == 1
        self.batches[rank].append([(op.op, op.group_peer, op.tensor.nbytes) for op in operations])
        return [Work(self._boxes, op) for op in operations]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    groups = FakeGroups()
    monkeypatch.setattr(p2p, "dist", groups)
    return groups


def run(plans: list[Plan], heads: int, kv_heads: int) -> None:
    """Forward and backward of every rank in turn, in bfloat16 so that gradients are wider.

    Messages of every role are on one communicator, which allows least.
    """
    kernel = KERNELS["reference"]
    calls = [executor.Call(kernel, 1.0, p2p.GroupLink(plan.rank)) for plan in plans]
    shapes = [((heads, plan.q_size), (kv_heads, plan.kv_size)) for plan in plans]
    inputs = [
        [torch.ones(1, *shape, 4, dtype=torch.bfloat16) for shape in (q, kv, kv)]
        for q, kv in shapes
    ]
    rows = list(zip(plans, inputs, calls, strict=True))
    outs = executor.together([executor.forward(plan, call, *x) for plan, x, call in rows])
    executor.together(
        [
            executor.backward(plan, call, Saved(x[0], *out, x[0]), *x[1:])
            for (plan, x, call), out in zip(rows, outs, strict=True)
        ]
    )


def check(batches: dict[int, list[list[tuple[str, int, int]]]]) -> None:
    """Pairs agree on sizes in order, and serial batches come to an end.

    A batch starts when the one before it has ended; a message passes when both of its ends are in
    batches that have started; a batch ends when all of its messages have passed.
    """
    ends: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank, own in batches.items():
        for kind, peer, size in (message for batch in own for message in batch):
            sender, reader = (rank, peer) if kind == "isend" else (peer, rank)
            ends[kind, sender, reader].append(size)
    for (kind, sender, reader), sizes in ends.items():
        other = "irecv" if kind == "isend" else "isend"
        assert sizes == ends[other, sender, reader], f"{sender} to {reader}"
    waiting = {rank: deque(map(set, own)) for rank, own in batches.items()}
    while any(waiting.values()):
        open_ = {rank: own[0] for rank, own in waiting.items() if own}
        passed = [
            (rank, message, (message[1], ("irecv", rank, message[2])))
            for rank, batch in open_.items()
            for message in batch
            if message[0] == "isend" and ("irecv", rank, message[2]) in open_.get(message[1], ())
        ]
        assert passed, f"every rank waits for another: {open_}"
        for rank, message, (peer, answer) in passed:
            open_[rank].discard(message)
            open_[peer].discard(answer)
        for own in waiting.values():
            while own and not own[0]:
                own.popleft()


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("exchange", sorted(SCHEDULES))
def test_named_layouts(exchange: str, world: int, fake: FakeGroups) -> None:
    length = 28
    masks = (
        Mask.causal(length),
        Mask.full(length),
        Mask.packed((0, 3, 4, 17, length)),
        Mask(length, length, window=(3, None)),
    )
    for mask in masks:
        for make in LAYOUTS.values():
            layout = make(length, world)
            plans = [
                build_plan(layout, layout, mask, rank=rank, exchange=exchange)
                for rank in range(world)
            ]
            run(plans, heads=8, kv_heads=2)
            check(fake.batches)
            assert fake.batches or mask.window is not None
            fake.batches.clear()


def test_random_calls(fake: FakeGroups) -> None:
    cases: list[Case] = [draw(n, seed=9, most_tokens=30, most_ranks=7) for n in range(150)]
    for case in cases:
        q_layout, kv_layout = case.layouts
        plans = [
            build_plan(q_layout, kv_layout, case.mask, rank=rank, exchange=case.schedule)
            for rank in range(case.world)
        ]
        mask = case.mask
        if mask.keys is None and (mask.documents is None or isinstance(mask.documents[0], int)):
            run(plans, *case.heads)
            check(fake.batches)
        fake.batches.clear()


def test_a_circle_is_found() -> None:
    one, other = [("isend", 1, 4)], [("irecv", 1, 4)]
    check({0: [one, other], 1: [[("irecv", 0, 4)], [("isend", 0, 4)]]})
    with pytest.raises(AssertionError, match="every rank waits for another"):
        check({0: [one, other], 1: [[("isend", 0, 4)], [("irecv", 0, 4)]]})
    with pytest.raises(AssertionError, match="0 to 1"):
        check({0: [one], 1: [[("irecv", 0, 8)]]})
