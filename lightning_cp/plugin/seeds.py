"""Random numbers of steps: alike on the ranks that share a sequence, and on a run that resumes."""

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_cp.diagnostics.verify.snapshot import undo_random_numbers


def base_seed() -> int:
    """The seed of `seed_everything` where it was called, else one that nobody knows."""
    given = os.environ.get("PL_GLOBAL_SEED")
    return random.SystemRandom().getrandbits(62) if given is None else int(given)


class StepSeeds:
    """Seeds the default generators (torch, Python, NumPy) for every step, and puts them back.

    What samplers and loaders draw goes on between steps as if steps drew nothing.

    Args:
        base: seed of the job, the same on every rank.
        device: index of this rank's virtual device.
    """

    def __init__(self, base: int, device: int) -> None:
        self._base, self._device = base, device

    @contextmanager
    def step(self, trainer: Any) -> Iterator[None]:
        """Run a step inside; what it draws depends on the seed and on its place in the run alone.

        Args:
            trainer: knows stage, epoch, optimizer steps and index of the batch.
        """
        undo = undo_random_numbers()
        _seed(self._of(trainer))
        try:
            yield
        finally:
            undo()

    def _of(self, trainer: Any) -> int:
        stage = str(getattr(trainer.state.stage, "value", trainer.state.stage))
        place = (trainer.current_epoch, trainer.global_step, _batches(trainer))
        key = repr((self._base, self._device, stage, *place)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _batches(trainer: Any) -> int:
    """How many batches of its epoch the running loop has fetched."""
    loop = trainer._active_loop
    progress = getattr(getattr(loop, "epoch_loop", loop), "batch_progress", None)
    return 0 if progress is None else int(progress.current.ready)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
