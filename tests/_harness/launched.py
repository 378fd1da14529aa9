"""A run whose ranks are not those of the pool: who starts them is what its tests are about.

`python -m tests._harness.launched FOLDER TRAINER STRATEGY` runs it with options in JSON, as a
user's script would be run on every node.
"""

import json
import multiprocessing
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_cp import ContextParallelStrategy
from tests._harness.models import Case, Outcome, fit, loaders, outcome, seeded
from tests._harness.pool import Pool

CASE = Case(samples=8, epochs=2, precision="64-true", momentum=0.9, shuffle=True)
PATIENCE = 100.0
"""Seconds; a run takes ten on an idle machine."""


class Left(NamedTuple):
    """What is left of a run in the process that called the Trainer.

    Attributes:
        outcome: see `Outcome`; what the module remembered is that of this process.
        scores: of a validation after it.
    """

    outcome: Outcome
    scores: dict[str, float]


def train(folder: Path, trainer: Mapping[str, Any], strategy: Mapping[str, Any] | str) -> None:
    """Fit and validate, and write a file named after the rank.

    Args:
        folder: where to.
        trainer: options of the Trainer.
        strategy: options of the context-parallel strategy, or the name of one.
    """
    torch.set_num_threads(1)
    model = seeded(CASE).double()  # as parameters return to the process that starts others
    chosen: Any = strategy if isinstance(strategy, str) else ContextParallelStrategy(**strategy)
    runs = pl.Trainer(
        accelerator="cpu",
        strategy=chosen,
        max_epochs=CASE.epochs,
        precision=CASE.precision,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    )
    runs.fit(model, *loaders(CASE))
    fitted = outcome(runs, model)
    (scores,) = runs.validate(model, loaders(CASE)[1], verbose=False)
    file = folder / f"{runs.global_rank}.pkl"
    file.write_bytes(pickle.dumps((fitted, dict(scores))))


def plain(pool: Pool, devices: int) -> list[Outcome]:
    """What the plain Trainer gives on every one of a number of devices."""
    return pool.run(fit, CASE, None, world=devices)


def left_by(folder: Path) -> dict[int, Left]:
    """What the processes of a run wrote, by rank."""
    files = folder.glob("*.pkl")
    return {int(file.stem): Left(*pickle.loads(file.read_bytes())) for file in files}


def start(folder: Path, trainer: Mapping[str, Any], strategy: Mapping[str, Any]) -> Left:
    """Run `train` in a process that may start others, and has all modules that the pool has."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=train, args=(folder, trainer, strategy))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, f"exit code {process.exitcode} within {PATIENCE} s"
    (found,) = left_by(folder).values()
    return found


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
