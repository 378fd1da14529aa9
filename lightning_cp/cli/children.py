"""Processes that a command starts: their environment and their threads."""

import os
import subprocess
import sys
from pathlib import Path

OF_A_LAUNCHER = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which a launcher tells a process its rank; processes of a command have their own."""


def threads_each(devices: int) -> int:
    """Threads of each of several processes: together they use every core once."""
    return max(_cores() // devices, 1)


def single_threads(devices: int) -> int:
    """Threads of one process that may use as many cores as `devices` processes do together."""
    return min(_cores(), devices * threads_each(devices))


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment without another launcher's ranks, with a number of threads.

    Threads that wait do so without spinning: on a machine with other work, spinning takes the core
    from the thread that is waited for. Torch's own warnings about sockets are left out: its errors
    are exceptions anyway.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    return (
        {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        | kept
        | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    )


def run_ranks(module: str, job: Path, ranks: int, *, threads: int) -> list[int]:
    """Run a program once per rank, as `python -m MODULE JOB RANK`, all at the same time.

    Args:
        module: the program.
        job: the file that tells it what to do.
        ranks: number of processes.
        threads: threads of each.

    Returns:
        The exit codes, in rank order. No process is left behind, whatever happens.
    """
    environment = child_environment(threads)
    command = [sys.executable, "-m", module, str(job)]
    children = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
    try:
        return [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
