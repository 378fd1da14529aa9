"""When blocks of a sharded model are gathered: issue order, own groups, the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallel, fsdp
from lightning_cp.context import reenter
from lightning_cp.diagnostics.trace import CollectiveRecorder
from lightning_cp.gathers import Gathers
from lightning_cp.mesh import parameter_mesh
from lightning_cp.topology import Topology
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

GATHERS, SUMS = ("_allgather_base_", "allgather_"), ("_reduce_scatter_base_", "reduce_scatter_")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Block(nn.Module):
    """Attention, then something linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Three blocks, some of which may be skipped, recomputed or called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(
        self, input_ids: Tensor, labels: Tensor, run: tuple[int, ...], *, again: bool
    ) -> Tensor:
        x = self.embedding(input_ids)
        for at in run:
            block = self.blocks[at]
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Recorder(CollectiveRecorder):
    """What was issued, one letter each: Gather, Keys, Sum of gradients, Product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.letters: list[str] = []

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        super()._look(func, args, kwargs, found)
        name = func.overloadpacket.__name__
        if name in GATHERS:
            self.letters.append("G")
        elif name in SUMS:
            self.letters.append("S")
        elif name == "send":
            self.letters.append("K")
        elif func in PRODUCTS:
            self.letters.append("P")

    def order(self) -> str:
        """The letters, without neighbours that are alike but for gathers."""
        runs = ((letter, len(list(same))) for letter, same in groupby(self.letters))
        return "".join(letter * (count if letter == "G" else 1) for letter, count in runs)


@contextmanager
def sharded(rank: int, world: int, window: str) -> Iterator[tuple[ContextParallel, Model, Gathers]]:
    """A sharded model whose blocks are gathered in a window."""
    with one_group(rank, world) as parallel:
        torch.manual_seed(0)
        model = Model().double()
        topology = Topology(dp=1, cp=world)
        cpu = torch.device("cpu")
        mesh = parameter_mesh(topology, device=cpu)
        fsdp.shard(model, mesh, fsdp.Sharding(stage=3), device=cpu)
        gathers = Gathers(model, window)
        parallel.attended = gathers.attended
        yield parallel, model, gathers
        gathers.close()


def step(
    parallel: ContextParallel,
    model: Model,
    gathers: Gathers,
    *,
    run: tuple[int, ...] = (0, 1, 2),
    again: bool = False,
    train: bool = True,
) -> tuple[Recorder, Recorder, list[Tensor]]:
    """One step: what its forward and its backward issued, and gradients of all parameters."""
    ids = torch.arange(23).remainder(16)[None]
    shard = parallel.shard({"input_ids": ids, "labels": ids.roll(1)}, module=model)
    forward, backward = Recorder(), Recorder()
    with parallel.active(shard):
        with forward, torch.set_grad_enabled(train):
            loss = model(**shard.batch, run=run, again=again)
        if train:
            with backward:
                reenter(loss, shard.context).backward()
    gathers.settle()
    fsdp.settle(model, failed=False)
    found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return forward, backward, [loss.detach(), *found]


def run_order(rank: int, world: int, window: str, again: bool) -> tuple[str, str]:
    with sharded(rank, world, window) as (parallel, model, gathers):
        for _ in range(3):  # the first learns the order, the second arranges it
            forward, backward, _ = step(parallel, model, gathers, again=again)
        assert gathers.window == window
        param, keys = (
            {call.group for call in (*forward.calls, *backward.calls) if call.name in names}
            for names in ((*GATHERS, *SUMS), ("send", "recv_"))
        )
        assert len(param) == len(keys) == 1
        assert param.isdisjoint(keys)
        return forward.order(), backward.order()


@pytest.mark.parametrize(
    ("window", "again", "forward", "backward"),
    [
        ("fsdp", False, "GGPKPGPKPGPKP", "GPGPKPSGPKPSPKPS"),
        ("early", False, "GGGPKPGPKPKP", "GPGPKPSGPKPSPKPS"),
        ("after_attention", False, "GGPKGPKGPKP", "GPKGPSPKGPSPKPS"),
        ("fsdp", True, "GGPKPGPKPGPKP", "GPGPKPKPSGPKPKPSPKPKPS"),
        ("after_attention", True, "GGPKGPKGPKP", "GPKGPKPSPKGPKPSPKPKPS"),
    ],
)
def test_issue_order(window: str, again: bool, forward: str, backward: str, pool: Pool) -> None:
    """Root and blocks of [products, attention, product]; what is recomputed gathers nothing."""
    for found in pool.run(run_order, window, again, world=2):
        assert found == (forward, backward)


def run_values(rank: int, world: int, window: str) -> list[Tensor]:
    """Losses and gradients of steps that skip blocks, repeat them, or only look."""
    found = []
    with sharded(rank, world, window) as (parallel, model, gathers):
        for run, train in (
            ((0, 1, 2), True),
            ((0, 1, 2), True),
            ((0, 2), True),
            ((0, 1, 2), True),
            ((0,), False),  # gathers block 1 for nothing, ...
            ((1, 1, 0, 2), True),  # ... which has other values by now
            ((0, 1, 2), False),
        ):
            *_, values = step(parallel, model, gathers, run=run, train=train)
            found += values
            with torch.no_grad():
                for x in model.parameters():
                    x.mul_(1.25)
            parts = (part for part in model.modules() if isinstance(part, FSDPModule))
            assert all(isinstance(x, DTensor) for part in parts for x in part.parameters())
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_no_window_changes_a_value(world: int, pool: Pool) -> None:
    torch_order = pool.run(run_values, "fsdp", world=world)
    for window in ("early", "after_attention"):
        for expected, found in zip(
            torch_order, pool.run(run_values, window, world=world), strict=True
        ):
            assert len(expected) == len(found)
            assert all(map(torch.equal, expected, found))


def run_closed(rank: int, world: int) -> tuple[str, str]:
    with sharded(rank, world, "after_attention") as (parallel, model, gathers):
        for _ in range(3):
            step(parallel, model, gathers)
        gathers.close()
        forward, backward, _ = step(parallel, model, gathers)
        return forward.order(), backward.order()


def test_a_closed_one_leaves_fsdps_order(pool: Pool) -> None:
    for found in pool.run(run_closed, world=2):
        assert found == ("GGPKPGPKPGPKP", "GPGPKPSGPKPSPKPS")
