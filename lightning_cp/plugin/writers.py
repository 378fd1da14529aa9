"""Prediction writers on ranks that get no predictions."""

from collections.abc import Iterable
from typing import Any

WRITES = ("write_on_batch_end", "write_on_epoch_end")
"""What a `BasePredictionWriter` implements."""


class MutedWriters:
    """Writers whose writes do nothing until `restore`; every other hook of theirs still runs.

    A context-parallel group is one device, and its first rank has the predictions: on the others a
    writer would overwrite them with nothing.

    Args:
        callbacks: all callbacks of a Trainer.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        writers = [x for x in callbacks if all(hasattr(x, name) for name in WRITES)]
        self._before = [(x, {n: vars(x)[n] for n in WRITES if n in vars(x)}) for x in writers]
        for writer in writers:
            vars(writer).update(dict.fromkeys(WRITES, _nothing))

    def restore(self) -> None:
        """Let them write again."""
        for writer, before in self._before:
            for name in WRITES:
                del vars(writer)[name]
            vars(writer).update(before)
        self._before = []


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Write nothing."""
