"""SIGTERM and the requeue signal of SLURM: every rank saves at one batch, and goes on there."""

import os
import signal
import stat
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_cp import ContextParallelStrategy
from tests._harness.models import Case, Outcome, loaders, outcome, seeded
from tests._harness.resumed import moved
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import PoolEnvironment

pytestmark = [pytest.mark.dist, needs_sharding]

CASE = Case(samples=14, momentum=0.9, precision="64-true")
FILE = {"zero_stage": 3}
FOLDER = {**FILE, "save_distributed_checkpoint": True}
KINDS = {
    "replicated": {},
    "file": FILE,
    "folder": FOLDER,
    "async": {**FOLDER, "save_distributed_checkpoint": "async"},
}


class SlurmPool(PoolEnvironment, SLURMEnvironment):
    """The ranks of the pool, as if srun had started them."""


class Send(Callback):
    """Sends this process a signal while a batch is trained."""

    def __init__(self, number: int, batch: int) -> None:
        self.number, self.batch = number, batch

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            os.kill(os.getpid(), self.number)


def trainer_in(
    folder: Path, environment: Any, options: dict[str, Any], callbacks: list[Any], **more: Any
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=environment.world_size(),
        strategy=ContextParallelStrategy(**options),
        plugins=[environment],
        callbacks=callbacks,
        default_root_dir=folder,
        precision=CASE.precision,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=any(isinstance(x, Checkpoint) for x in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def fit_terminated(
    rank: int, world: int, options: dict[str, Any], folder: Path, at: int, accumulate: int
) -> int:
    """The last rank alone gets a SIGTERM; number of batches that this rank trained."""
    callbacks: list[Any] = [OnExceptionCheckpoint(folder)]
    if rank == world - 1:
        callbacks.append(Send(signal.SIGTERM, at))
    model = seeded(CASE)
    environment = PoolEnvironment(rank, world)
    run = trainer_in(folder, environment, options, callbacks, accumulate_grad_batches=accumulate)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        run.fit(model, *loaders(CASE))
    assert signal.getsignal(signal.SIGTERM) == before
    return run.fit_loop.epoch_loop.batch_progress.current.completed


def fit_requeued(
    rank: int, world: int, options: dict[str, Any], folder: Path, at: int
) -> list[int]:
    """All ranks get the signal of SLURM, each in another batch."""
    command = folder / f"rank{rank}" / "scontrol"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $@ > {command.parent}/said\n")
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    callbacks = [Send(signal.SIGUSR1, at - rank)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "17")
        patch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
        model = seeded(CASE)
        run = trainer_in(folder, SlurmPool(rank, world), options, callbacks)
        run.fit(model, *loaders(CASE))
    return model.ids


def go_on(
    rank: int, world: int, options: dict[str, Any], folder: Path, path: str, accumulate: int = 1
) -> Outcome:
    model = moved(CASE).double()
    environment = SlurmPool(rank, world)
    run = trainer_in(folder, environment, options, [], accumulate_grad_batches=accumulate)
    run.fit(model, *loaders(CASE), ckpt_path=path)
    return outcome(run, model)


def fit_whole(
    rank: int, world: int, options: dict[str, Any], folder: Path, accumulate: int
) -> Outcome:
    model = seeded(CASE).double()
    environment = PoolEnvironment(rank, world)
    run = trainer_in(folder, environment, options, [], accumulate_grad_batches=accumulate)
    run.fit(model, *loaders(CASE))
    return outcome(run, model)


def assert_continued(found: Outcome, whole: Outcome, batches: int) -> None:
    assert found.ids == whole.ids[batches * CASE.batch :]
    for name, value in whole.parameters.items():
        assert np.abs(found.parameters[name] - value).max() <= 1e-10, name


@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [("file", 1), ("folder", 2), *(pytest.param(x, 1, marks=pytest.mark.full) for x in KINDS)],
)
def test_sigterm(kind, accumulate, pool, tmp_path):
    """It arrives in the second batch and is known in the fourth, with which a step ends."""
    options = KINDS[kind]
    batches = pool.run(fit_terminated, options, tmp_path, 1, accumulate, world=2)
    assert batches == [4, 4]
    path = tmp_path / "on_exception.ckpt"
    assert path.is_dir() == (kind in ("folder", "async"))
    (whole,) = pool.run(fit_whole, {}, tmp_path, accumulate, world=1)
    for found in pool.run(go_on, options, tmp_path, str(path), accumulate, world=2):
        assert_continued(found, whole, 4)


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x == "folder" else pytest.mark.full) for x in KINDS]
)
@pytest.mark.parametrize("at", [3, pytest.param(5, marks=pytest.mark.full)])
def test_slurm_requeues(kind, at, pool, tmp_path):
    """It is saved once, with `at` 5 before the last batch of the epoch."""
    options = KINDS[kind]
    seen = pool.run(fit_requeued, options, tmp_path, at, world=2)
    assert seen[0] == seen[1]
    assert (tmp_path / "rank0" / "said").read_text() == "requeue 17\n"
    assert not (tmp_path / "rank1" / "said").exists()
    (saved,) = tmp_path.glob("hpc_ckpt_*")
    assert saved.is_dir() == (kind in ("folder", "async"))
    (whole,) = pool.run(fit_whole, {}, tmp_path, 1, world=1)
    for found in pool.run(go_on, options, tmp_path, "hpc", world=2):
        assert_continued(found, whole, at + 1)
