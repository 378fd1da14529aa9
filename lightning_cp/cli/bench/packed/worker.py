"""`python -m lightning_cp.cli.bench.packed.worker JOB RANK`: one rank of real processes."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.balance import layout_of
from lightning_cp.cli.bench.attention.measure import DistributedCall, Inputs, timed
from lightning_cp.cli.bench.balance.rows import row
from lightning_cp.cli.bench.packed.measure import inputs_of, local_of, plan_of
from lightning_cp.cli.bench.packed.peer import PeerCall, peer_lengths
from lightning_cp.cli.bench.packed.settings import Settings, Sizes
from lightning_cp.cli.bench.packed.step import Steps, batch_of
from lightning_cp.comm.failure import report
from lightning_cp.comm.p2p import GroupLink
from lightning_cp.errors import ContextParallelError
from lightning_cp.kernels import resolve

FAILED = 2
Seconds = dict[str, list[float]]
"""By arm, CPU time of every run."""
Arms = dict[str, Callable[[], object]]
"""What is measured, by name."""


def main() -> int:
    """Run one rank and write its result.

    Returns:
        The exit code: 0, or 2 after an error of this package.
    """
    job, rank = Path(sys.argv[1]), int(sys.argv[2])
    settings = Settings.from_json(json.loads(job.read_text(encoding="ascii")))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.parent / 'rendezvous'}",
        rank=rank,
        world_size=settings.sizes.ranks,
    )
    try:
        found = run(settings, rank)
    except ContextParallelError as error:
        report(error)
        print(f"error on rank {rank}: {error}", file=sys.stderr)
        return FAILED
    result_of(job.parent, rank).write_text(json.dumps(found), encoding="ascii")
    dist.destroy_process_group()
    return 0


def result_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its result: a JSON list with `Seconds` for every draw."""
    return folder / f"rank{rank}.json"


def run(settings: Settings, rank: int) -> list[Seconds]:
    """All draws, the arms of each in turns."""
    group: Any = dist.group.WORLD
    steps = Steps(settings.sizes, rank=rank, group=group) if settings.sizes.mode == "step" else None
    found = []
    for place, seed in enumerate(settings.seeds):
        lengths = row(seed, settings.sizes.tokens)
        if steps is not None:
            batch = batch_of(lengths, seed)
            arms: Arms = {name: partial(steps, name, batch) for name in settings.layouts}
        else:
            arms = attention_arms(settings, lengths, seed, rank=rank, group=group)
        found.append(_in_turns(settings, arms, warm_up=place == 0))
    if steps is not None:
        steps.close()
    return found


def attention_arms(
    settings: Settings, lengths: Sequence[int], seed: int, *, rank: int, group: Any
) -> Arms:
    """A forward and a backward of attention under every layout, and by the peer."""
    sizes = settings.sizes
    whole = inputs_of(sizes, seed)
    kernel, link = resolve("auto", whole.q, whole.v), GroupLink(group)
    arms: Arms = {}
    for name in settings.layouts:
        layout = layout_of(name, lengths, sizes.ranks)
        plan = plan_of(sizes, layout, lengths, rank)
        arms[name] = DistributedCall(plan, kernel, local_of(whole, layout, rank), link)
    if settings.peer is not None:
        arms[settings.peer] = _peer(sizes, lengths, whole, rank=rank, group=group)
    return arms


def _peer(
    sizes: Sizes, lengths: Sequence[int], whole: Inputs, *, rank: int, group: Any
) -> PeerCall:
    """The peer's call, on the same numbers with the dummies that it needs behind them."""
    taken = peer_lengths(lengths, sizes.ranks)
    missing = sum(taken) - sizes.tokens
    packed = [
        torch.cat([x[0].transpose(0, 1), x.new_zeros(missing, sizes.heads, sizes.head_dim)])
        for x in whole
    ]
    return PeerCall(taken, packed, rank=rank, world=sizes.ranks, group=group)


def _in_turns(settings: Settings, arms: Arms, *, warm_up: bool) -> Seconds:
    """A B C A B C ..., all ranks together; the first time every arm once more, dropped."""
    for arm in arms.values() if warm_up else ():
        arm()
    found: Seconds = {name: [] for name in arms}
    for _ in range(settings.repeats):
        for name, arm in arms.items():
            found[name].append(timed(arm, barrier=dist.barrier).cpu)
    return found


if __name__ == "__main__":
    sys.exit(main())
