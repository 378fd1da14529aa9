"""`python -m lightning_cp.cli.bench.calibrate.worker JOB RANK`: one end of the link."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_cp.cli.bench.calibrate.fit import Sent
from lightning_cp.cli.bench.calibrate.measure import sent
from lightning_cp.comm.failure import report
from lightning_cp.comm.p2p import GroupLink
from lightning_cp.errors import ContextParallelError

FAILED = 2


def main() -> int:
    """Send messages around the ring and write how long they took.

    Returns:
        The exit code: 0, or 2 after an error of this package.
    """
    job, rank = Path(sys.argv[1]), int(sys.argv[2])
    told = json.loads(job.read_text(encoding="ascii"))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.parent / 'rendezvous'}",
        rank=rank,
        world_size=told["world"],
    )
    try:
        found = sent(GroupLink(dist.group.WORLD), rank=rank, barrier=lambda: dist.barrier(), **told)
    except ContextParallelError as error:
        report(error)
        return FAILED
    _file(job.parent, rank).write_text(json.dumps(found), encoding="ascii")
    dist.destroy_process_group()
    return 0


def slowest(folder: Path, world: int) -> list[Sent]:
    """For every size of messages the time of the slowest rank."""
    ranks = [json.loads(_file(folder, rank).read_text(encoding="ascii")) for rank in range(world)]
    return [Sent(own[0][0], max(x[1] for x in own)) for own in zip(*ranks, strict=True)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


if __name__ == "__main__":
    sys.exit(main())
