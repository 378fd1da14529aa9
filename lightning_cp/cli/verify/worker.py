"""`python -m lightning_cp.cli.verify.worker JOB RANK`: one rank of a verification."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.api import ContextParallel
from lightning_cp.cli.verify.command import DIFFERENT
from lightning_cp.cli.verify.job import Job
from lightning_cp.cli.verify.settings import Settings
from lightning_cp.comm.failure import report
from lightning_cp.config import Config
from lightning_cp.diagnostics.verify import Report
from lightning_cp.errors import ConfigError, ContextParallelError
from lightning_cp.mesh import build_mesh
from lightning_cp.topology import Topology
from lightning_cp.verification import PATIENCE, verify

FAILED = 2


def main() -> int:
    """Run one rank; the first one prints the table and writes the result.

    Returns:
        The exit code: 0, 1 where something differs, 2 after an error, printed in one line.
    """
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = Job.load(path)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path.parent / 'rendezvous'}",
        rank=rank,
        world_size=job.ranks,
        timeout=PATIENCE,
    )
    try:
        found = _verify(job, rank)
    except ContextParallelError as error:
        report(error)
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    if rank == 0:
        _save(found, Path(job.result))
    dist.destroy_process_group()
    return 0 if found.ok else DIFFERENT


def _verify(job: Job, rank: int) -> Report:
    module, batch, options = _wanted(job)
    mesh = build_mesh(
        Topology.resolve(world=job.ranks, local_world=job.ranks, cp=job.ranks, dp=1),
        device=torch.device("cpu"),
        timeout=PATIENCE,
    )
    parallel = ContextParallel(
        mesh.cp,
        a2a=mesh.cp_a2a,
        meta=mesh.meta,
        rank=rank,
        world=job.ranks,
        config=Config(**options),
    )
    try:
        return verify(module, batch, parallel=parallel, max_tokens=job.max_tokens)
    finally:
        parallel.close()


def _wanted(job: Job) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    """Module, batch and options; those of the command line win."""
    if job.config is not None:
        settings = Settings(job.config)
        module, batch = settings.build(job.seed)
        return module, batch, {**settings.options(), **job.options}
    if job.target is None:
        raise ConfigError("the job names neither a function nor a configuration")
    torch.manual_seed(job.seed)
    return *_target(job.target), dict(job.options)


def _target(target: str) -> tuple[torch.nn.Module, Any]:
    """What the user's function returns.

    Raises:
        ConfigError: if the file has no such function, or it returns something else.
    """
    file, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file!r} is no Python file")
    source = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = source
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec.loader.exec_module(source)
    if not callable(getattr(source, name, None)):
        raise ConfigError(f"{file!r} has no function {name!r}")
    found = getattr(source, name)()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.nn.Module)):
        raise ConfigError(
            f"{target} returned {type(found).__name__}; return (module, batch), a torch module and "
            f"a whole batch as the loader gives it"
        )
    return found


def _save(found: Report, path: Path) -> None:
    finding, compared = found.finding, found.compared
    value = {
        "ok": found.ok,
        "finding": None if finding is None else {**finding._asdict(), "text": str(finding)},
        "calls": compared.calls,
        "loss": list(compared.loss),
        "attention": list(compared.attention),
        "worst_output": compared.output,
        "worst_gradient": max(compared.gradients.values(), default=0.0),
    }
    path.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
