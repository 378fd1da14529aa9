"""`python -m lightning_cp.cli.bench.attention.worker JOB RANK`: one rank of one launch."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.cli.bench.attention.measure import (
    Attention,
    CountingLink,
    DistributedCall,
    Inputs,
    KernelCalls,
    phases,
    timed,
)
from lightning_cp.cli.bench.attention.results import CaseResult, Checks, RankResult
from lightning_cp.cli.bench.attention.settings import DTYPES, Case, Launch, Settings
from lightning_cp.cli.bench.attention.truth import Truth
from lightning_cp.comm.failure import report
from lightning_cp.comm.gather import gather
from lightning_cp.comm.p2p import BlockingLink, GroupLink, Link
from lightning_cp.comm.throttle import PROBE_BYTES, ThrottledLink, measured_rate
from lightning_cp.diagnostics.trace import MemoryTracker
from lightning_cp.errors import ContextParallelError
from lightning_cp.kernels import resolve

PATIENCE = timedelta(hours=1)
FAILED = 2
PROBE_SECONDS = 0.1
"""A message by which a link measures itself lasts so long at most."""
PHASE_RUNS = 3
"""At most so many runs are measured phase by phase, and never more than there are pairs."""


def main() -> int:
    """Run one rank and write its result.

    Returns:
        The exit code: 0, or 2 after an error of this package, printed in one line by rank 0.
    """
    job, rank = Path(sys.argv[1]), int(sys.argv[2])
    launch, folder = Launch.load(job), job.parent
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=launch.settings.world,
        timeout=PATIENCE,
    )
    try:
        _Rank(launch, rank).run().save(folder, rank)
    except ContextParallelError as error:
        report(error)
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    dist.destroy_process_group()
    return 0


class _Rank:
    """The measurements of one rank."""

    def __init__(self, launch: Launch, rank: int) -> None:
        self._settings, self._first = launch
        self._rank = rank
        self._layout = self._settings.whole_layout
        group = dist.group.WORLD
        assert group is not None  # invariant: initialised above
        self._group = group
        self._plain: Link = GroupLink(group)
        self._timed: Link = self._plain
        if self._settings.network is not None:
            self._timed = ThrottledLink(self._plain, self._settings.network)

    def run(self) -> RankResult:
        """Measure every case; tensors and their truth are made once per dtype."""
        settings, rate = self._settings, None
        if settings.network is not None:
            rate = measured_rate(
                self._timed,
                rank=self._rank,
                world=settings.world,
                size=min(int(settings.network * 1e9 / 8 * PROBE_SECONDS) + 1, PROBE_BYTES),
            )
        cases = []
        for dtype in settings.dtypes:
            whole = _inputs(settings, DTYPES[dtype])
            local = Inputs(*map(self._shard, whole))
            judge = self._first and self._rank == 0
            truth = Truth(whole, settings.mask) if judge else None
            del whole
            cases += [
                self._case(case, local, truth) for case in settings.cases if case.dtype == dtype
            ]
        return RankResult(link_rate=rate, cases=cases)

    def _case(self, case: Case, inputs: Inputs, truth: Truth | None) -> CaseResult:
        settings = self._settings
        kernel = resolve("auto", inputs.q, inputs.v)
        ideal = KernelCalls(kernel)
        whole_heads = settings.plan(case.exchange, self._rank, head_chunks=1)
        DistributedCall(whole_heads, ideal, inputs, self._plain)()
        checks = self._check(case, inputs, truth) if self._first else None
        link = self._timed if case.overlap else BlockingLink(self._timed)
        plan = settings.plan(case.exchange, self._rank)
        real = DistributedCall(plan, kernel, inputs, link)
        ideal.again()
        real()
        ideals, reals = [timed(ideal.again, barrier=self._barrier)], []
        for _ in range(settings.repeats):
            reals.append(timed(real, barrier=self._barrier))
            ideals.append(timed(ideal.again, barrier=self._barrier))
        return CaseResult(
            ideal_cpu=[took.cpu for took in ideals],
            ideal_wall=[took.wall for took in ideals],
            real_cpu=[took.cpu for took in reals],
            real_wall=[took.wall for took in reals],
            phases=phases(real, runs=min(PHASE_RUNS, settings.repeats), barrier=self._barrier),
            checks=checks,
        )

    def _check(self, case: Case, inputs: Inputs, truth: Truth | None) -> Checks:
        """Errors, bytes and memory of one run over the plain link."""
        counting = CountingLink(self._plain)
        link = counting if case.overlap else BlockingLink(counting)
        plan = self._settings.plan(case.exchange, self._rank)
        kernel = resolve("auto", inputs.q, inputs.v)
        trackers = MemoryTracker(), MemoryTracker()
        found = DistributedCall(plan, kernel, inputs, link)(watch=trackers)
        shards = [
            gather(x, self._layout.sizes, dim=2, rank=self._rank, group=self._group, to=0)
            for x in found
        ]
        errors = {}
        if truth is not None:
            whole = (self._layout.unshard(parts, dim=2) for parts in shards)
            errors = truth.ratios(Attention(*whole))
        return Checks(
            errors=errors,
            bytes_sent=counting.bytes_sent,
            memory=(trackers[0].peak, trackers[1].peak),
        )

    def _shard(self, whole: Tensor) -> Tensor:
        """This rank's tokens, stored token by token as a model's projections leave them."""
        local = self._layout.shard(whole, rank=self._rank, dim=2)
        return local.transpose(1, 2).contiguous().transpose(1, 2)

    def _barrier(self) -> None:
        dist.barrier(self._group)


def _inputs(settings: Settings, dtype: torch.dtype) -> Inputs:
    """Whole tensors of normal numbers, the same on every rank and in every launch."""
    generator = torch.Generator().manual_seed(settings.seed)
    heads = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    shapes = ((1, count, settings.seqlen, settings.head_dim) for count in heads)
    return Inputs(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


if __name__ == "__main__":
    sys.exit(main())
