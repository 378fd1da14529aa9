"""Gloo ranks that live for the whole test session: a task costs milliseconds."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_cp.context import SLOT
from lightning_cp.swap._torch import OPERATORS, has_override, keys
from tests._harness.renamed import LIGHTNING, rename

SIZE = 4
PRELOADED = [
    "lightning.pytorch",
    "torch._inductor.compile_fx",
    "lightning_cp",
    "transformers.models.llama.modeling_llama",
]
PATIENCE = 60.0


class Failure(NamedTuple):
    """An exception on a rank: its type's name, its message and the traceback."""

    kind: str
    message: str
    trace: str


class RankError(AssertionError):
    """A task failed on a rank."""


class Pool:
    """`SIZE` processes, or more where a task needs them; it runs on the first `world` of them.

    A task is a function of a module, called as `function(rank, world, *args)` with the default
    process group of `world` gloo ranks in place. Ranks that fail, hang
    or keep many threads are replaced.

    Args:
        package: what tasks find as `lightning.pytorch`: that, or `pytorch_lightning`.
    """

    def __init__(self, package: str = LIGHTNING) -> None:
        self._package = package
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._world = 0
        self._rendezvous = 0

    def run(
        self, function: Callable[..., Any], *args: Any, world: int, timeout: float = PATIENCE
    ) -> list[Any]:
        """What the task returned on every rank.

        Raises:
            RankError: with the traceback of the first rank that failed.
            TimeoutError: if a rank did not answer; the ranks are killed.
        """
        found = self._outcomes(function, args, world, timeout)
        for rank, outcome in enumerate(found):
            if isinstance(outcome, Failure):
                raise RankError(f"rank {rank} of {world}: {outcome.trace}")
        return found

    def failures(
        self, function: Callable[..., Any], *args: Any, world: int, timeout: float = 30.0
    ) -> list[Failure]:
        """The exceptions of a task that must fail on every rank, within `timeout`.

        Raises:
            RankError: if the task succeeded on a rank.
            TimeoutError: if a rank did not answer.
        """
        found = self._outcomes(function, args, world, timeout)
        for rank, outcome in enumerate(found):
            if not isinstance(outcome, Failure):
                raise RankError(f"rank {rank} of {world} did not fail but returned {outcome!r}")
        return found

    def end(self) -> None:
        """End every process for good."""
        self.close()
        self._folder.cleanup()

    def close(self) -> None:
        """End every process; the next task starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._world = [], [], 0

    def _outcomes(
        self, function: Callable[..., Any], args: Any, world: int, timeout: float
    ) -> list[Any]:
        self._start(max(SIZE, world))
        if world != self._world:
            self._rendezvous += 1
        self._world = world
        file = str(Path(self._folder.name) / str(self._rendezvous))
        task = pickle.dumps((function, args))
        for rank in range(world):
            self._pipes[rank].send((rank, world, file, task))
        found, threads = [], 0
        for rank in range(world):
            if not self._pipes[rank].poll(timeout):
                self.close()
                raise TimeoutError(f"rank {rank} of {world} gave no answer within {timeout} s")
            try:
                outcome, left = self._pipes[rank].recv()
            except EOFError:
                outcome, left = Failure("EOFError", "the process died", "the process died"), 0
            found.append(outcome)
            threads = max(threads, left)
        if threads > MOST_THREADS or any(isinstance(outcome, Failure) for outcome in found):
            self.close()
        return found

    def _start(self, size: int) -> None:
        while len(self._processes) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, self._package), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


MOST_THREADS = 150
"""Threads of a rank above which the ranks are replaced.

Groups of a sharded module keep theirs as long as the process; hundreds of them slow down every
later task.
"""


def _serve(pipe: Connection, package: str) -> None:
    if package != LIGHTNING:
        rename()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # also fills torch.empty with NaN
    joined = ""
    while True:
        try:
            rank, world, file, task = pipe.recv()
        except EOFError:
            return
        try:
            if file != joined:
                _join(rank, world, file)
                joined = file
            function, args = pickle.loads(task)
            outcome = function(rank, world, *args)
            _check_clean()
        except BaseException as error:
            outcome = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send((outcome, _threads()))


def _join(rank: int, world: int, file: str) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )


def _threads() -> int:
    """How many threads this process has, those of libraries included; 0 where nobody says."""
    folder = Path("/proc/self/task")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def _check_clean() -> None:
    """A task must leave nothing behind that changes the next one."""
    left = [name for name in OPERATORS for key in keys("cpu") if has_override(name, key)]
    if left or SLOT.active is not None or SLOT.suspended:
        raise RankError(f"the task left overrides {left} or a context {SLOT.active} behind")
