"""Runs that go on from a checkpoint, and what the uninterrupted run did in the same epoch."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests._harness.models import Case, LanguageModel, Outcome, loaders, outcome, seeded, trainer_of


class Mesh(NamedTuple):
    """A number of ranks and the options of the strategy; None: the plain Trainer."""

    world: int
    options: dict[str, Any] | None


def moved(case: Case) -> LanguageModel:
    """A module whose parameters are others than those of `seeded`: a checkpoint has to set them."""
    model = seeded(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def fit_resuming(
    rank: int, world: int, case: Case, options: dict[str, Any] | None, path: Path
) -> Outcome:
    """Continue from a checkpoint; a task of the pool."""
    model = moved(case)
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(model, *loaders(case), ckpt_path=path)
    return outcome(trainer, model)


def second_epoch(whole: Outcome, case: Case) -> Outcome:
    """What is left of two epochs, had they begun with the second."""
    half = len(whole.step_losses) // 2
    return whole._replace(ids=whole.ids[half * case.batch :], step_losses=whole.step_losses[half:])
