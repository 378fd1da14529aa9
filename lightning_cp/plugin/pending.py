"""A checkpoint that is written while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException


class Pending:
    """A save that threads of all ranks carry on.

    Args:
        written: becomes done on a rank when that rank knows that all have written, or that one
            has failed.
        path: name of the checkpoint.
        then: what this rank does when all have written; None: nothing.

    Attributes:
        path: name of the checkpoint.
        outlived: checkpoints that may go when this one is complete.
    """

    def __init__(self, written: Future[Any], path: Path, then: Callable[[], None] | None) -> None:
        self.path, self.outlived = path, list[Any]()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._end = thread.submit(_finish, written, then)
        thread.shutdown(wait=False)

    def is_complete(self) -> bool:
        """Whether it has its name; does not wait."""
        return self._end.done() and self._end.exception() is None

    def error(self) -> BaseException | None:
        """Why it failed on this rank; waits for its end."""
        return self._end.exception()

    def raise_error(self) -> None:
        """Wait for its end, and raise what it failed with on this rank."""
        self._end.result()


def _finish(written: Future[Any], then: Callable[[], None] | None) -> None:
    written.result()
    if then is not None:
        then()


def why(error: BaseException) -> str:
    """An error in one line; one that names the ranks that failed as such."""
    if isinstance(error, CheckpointException):
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        return ", ".join(f"rank {rank}: {why(cause)}" for rank, cause in causes.items())
    return f"{type(error).__name__}: {error}"
