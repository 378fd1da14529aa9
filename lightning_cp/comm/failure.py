"""Failures of other ranks: reported through the store, so that every rank can say who failed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_cp.compat import default_store
from lightning_cp.errors import ContextParallelError, PeerError

_KEY = "lightning_cp/error"


def report(error: BaseException) -> None:
    """Write this rank's error where the others look when a collective fails."""
    store = default_store()
    if store is None or isinstance(error, PeerError):
        return
    text = f"{type(error).__name__}: {error}"
    try:
        if not store.check([_KEY]):
            store.set(_KEY, f"{dist.get_rank()}|{text}")
    except RuntimeError:
        return


def forget() -> None:
    """Remove what an earlier run of this job reported; before the ranks of a new run meet."""
    store = default_store()
    if store is not None and dist.get_rank() == 0:
        store.delete_key(_KEY)


def reported() -> tuple[int, str] | None:
    """Rank and text of the first reported error, None where there is none or no store answers."""
    store = default_store()
    try:
        if store is None or not store.check([_KEY]):
            return None
        rank, text = store.get(_KEY).decode().split("|", 1)
    except RuntimeError:
        return None
    return int(rank), text


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turn a failed collective into an error that names the rank that failed.

    Raises:
        PeerError: in place of the backend's RuntimeError.
    """
    try:
        yield
    except ContextParallelError:
        raise
    except RuntimeError as error:
        found = reported()
        if found is None:
            raise PeerError(
                f"{what} failed: another rank ended or did not answer in time, and left no "
                f"message; look at the output of the other ranks ({error})"
            ) from error
        rank, text = found
        raise PeerError(f"{what} failed because rank {rank} stopped with {text}") from error
