"""Runs with the Trainer of `pytorch_lightning`; what they are compared with is `models.fit`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_cp.plugin.pytorch_lightning import ContextParallelStrategy
from tests._harness.models import Case, Outcome, Steps, loaders, outcome
from tests._harness.trainer import pool_trainer

PACKAGE = "pytorch_lightning"


class OtherLanguageModel(Steps, pytorch_lightning.LightningModule):
    """For Trainers of `pytorch_lightning`."""


def other_model(case: Case, shift: float = 0.0) -> OtherLanguageModel:
    """The parameters are those of `models.seeded`, plus a number."""
    pytorch_lightning.seed_everything(7, verbose=False)
    model = OtherLanguageModel(case)
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.add_(shift)
    return model


def other_fit(
    rank: int,
    world: int,
    case: Case,
    options: Mapping[str, Any] | str,
    *,
    folder: Path | None = None,
    resume: Path | None = None,
) -> Outcome:
    """Train and validate; a task of the pool.

    Args:
        rank: rank of this process.
        world: number of ranks.
        case: what to run.
        options: of the strategy, or its registered name.
        folder: where checkpoints go, if there are any.
        resume: a checkpoint to go on from; the parameters the module starts with are others.
    """
    strategy = options if isinstance(options, str) else ContextParallelStrategy(**options)
    saving: dict[str, Any] = {}
    if folder is not None:
        callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
        saving = {"enable_checkpointing": True, "callbacks": [callback]}
    trainer = pool_trainer(
        rank,
        world,
        strategy,
        package=PACKAGE,
        max_epochs=case.epochs,
        precision=case.precision,
        num_sanity_val_steps=0,
        **dict(case.trainer),
        **saving,
    )
    model: Any = other_model(case, shift=0.0 if resume is None else 1.0)
    trainer.fit(model, *loaders(case), ckpt_path=resume)
    return outcome(trainer, model)
