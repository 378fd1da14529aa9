"""`python -m lightning_cp.cli.bench.overlap.worker JOB RANK`: one rank."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp import fsdp
from lightning_cp.api import ContextParallel
from lightning_cp.balance import CostModel, gather_window
from lightning_cp.balance.windows import WIDTH
from lightning_cp.cli.bench.attention.measure import Inputs
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.overlap.model import Stack
from lightning_cp.cli.bench.overlap.results import RankResult, Spans
from lightning_cp.cli.bench.overlap.settings import ARMS, Settings
from lightning_cp.comm.failure import report
from lightning_cp.comm.p2p import GroupLink
from lightning_cp.comm.throttle import ThrottledGather, ThrottledLink, measured_rate
from lightning_cp.config import Config
from lightning_cp.context import reenter
from lightning_cp.errors import ContextParallelError
from lightning_cp.gathers import Gathers
from lightning_cp.mesh import build_mesh, parameter_mesh
from lightning_cp.topology import Topology

FAILED = 2
CPU = torch.device("cpu")


def main() -> int:
    """Run one rank and write its result.

    Returns:
        The exit code: 0, or 2 after an error of this package.
    """
    job, rank = Path(sys.argv[1]), int(sys.argv[2])
    settings = Settings(**json.loads(job.read_text(encoding="ascii")))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.parent / 'rendezvous'}",
        rank=rank,
        world_size=settings.world,
    )
    try:
        run(settings, rank).save(job.parent, rank)
    except ContextParallelError as error:
        report(error)
        return FAILED
    dist.destroy_process_group()
    return 0


def run(settings: Settings, rank: int) -> RankResult:
    """Steps of all windows, in turns."""
    topology = Topology(dp=1, cp=settings.world)
    mesh = build_mesh(topology, device=CPU)
    link = ThrottledLink(GroupLink(mesh.cp), settings.network)
    rate = measured_rate(
        link, rank=rank, world=settings.world, size=int(settings.network * 1e9 / 8 * 0.05) + 1
    )
    parallel = ContextParallel(
        mesh.cp,
        meta=mesh.meta,
        rank=rank,
        world=settings.world,
        config=Config(sequence_dims={"x": 1}),
    )
    steps = _Steps(settings, parallel, link)
    chosen = _chosen(settings)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    spans: dict[str, Spans] = {}
    again = []
    for arm in ARMS:
        steps.prepare(arm if arm != "auto" else chosen)
        steps()
    for _ in range(settings.repeats):
        for arm in ARMS:
            steps.prepare(arm if arm != "auto" else chosen)
            seconds[arm].append(steps())
            spans[arm] = steps.spans
        steps.prepare(ARMS[0])
        again.append(steps())
    parallel.close()
    return RankResult(rate=rate, chosen=chosen, seconds=seconds, again=again, spans=spans)


class _Steps:
    """A sharded model on a slow link.

    Attributes:
        spans: see `RankResult`, of the last step.
    """

    spans: Spans

    def __init__(self, settings: Settings, parallel: ContextParallel, link: ThrottledLink) -> None:
        self._parallel, self._link = parallel, link
        torch.manual_seed(0)
        dtype = DTYPES[settings.dtype]
        self._model = Stack(layers=settings.layers, width=settings.width, heads=settings.heads).to(
            dtype
        )
        self._x = torch.randn(1, settings.seqlen, settings.width, dtype=dtype)
        mesh = parameter_mesh(Topology(dp=1, cp=settings.world), device=CPU)
        fsdp.shard(self._model, mesh, fsdp.Sharding(stage=3), device=CPU)
        slow: Any = ThrottledGather(link)
        for part in fsdp.sharded_parts(self._model):
            part.set_custom_all_gather(slow)
        self._gathers = Gathers(self._model)
        parallel.attended = self._gathers.attended
        self._run()  # the order of the blocks is known now

    def prepare(self, window: str) -> None:
        """Take a window, from the next step on."""
        self._gathers.choose(window)

    def __call__(self) -> float:
        """Seconds of one step; all ranks begin it together."""
        dist.barrier()
        self._link.spans.clear()
        start = time.monotonic()
        self._run()
        seconds = time.monotonic() - start
        self.spans = [(kind, a - start, b - start) for kind, a, b in self._link.spans]
        return seconds

    def _run(self) -> None:
        shard = self._parallel.shard({"x": self._x}, module=self._model)
        context = replace(shard.context, link=self._link)
        with self._parallel.active(replace(shard, context=context)):
            reenter(self._model(shard.batch["x"]), context).backward()
        self._gathers.settle()
        fsdp.settle(self._model, failed=False)
        self._model.zero_grad()


def _chosen(settings: Settings) -> str:
    """What "auto" takes on this machine, whose speed is that of one tile; the same on all ranks."""
    size, heads, width = settings.seqlen // settings.world, settings.heads, settings.width
    tensors = Inputs(
        *(torch.randn(1, heads, size, width // heads, dtype=DTYPES[settings.dtype]),) * 4
    )
    seconds = torch.tensor([_attention_seconds(tensors)], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    pair = float(seconds) / (size * (size + 1) / 2) * WIDTH / width
    return gather_window(
        tokens=settings.seqlen,
        pairs=settings.seqlen * (settings.seqlen + 1) // 2,
        width=width,
        parameters=12 * width * width,
        itemsize=DTYPES[settings.dtype].itemsize,
        ranks=settings.world,
        cp=settings.world,
        cost=CostModel(pair=pair, bandwidth=settings.network * 1e9 / 8),
    )


def _attention_seconds(tensors: Inputs) -> float:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    took = []
    for _ in range(3):
        start = time.monotonic()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(tensors.grad_out)
        took.append(time.monotonic() - start)
    return min(took)


if __name__ == "__main__":
    sys.exit(main())
