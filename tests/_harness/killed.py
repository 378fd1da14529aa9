"""A run that saves all the time, in processes of its own, until one of them is killed."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_cp.fsdp import whole
from lightning_cp.plugin.aside import newest
from tests._harness.models import Case, LanguageModel, loaders, seeded, trainer_of
from tests._harness.pool import PRELOADED

CASE = Case(samples=64, momentum=0.9, epochs=10_000)
WORLD, TIMEOUT = 2, 10.0
PATIENCE = 60.0
"""Seconds for processes to start and to save on a busy machine."""


class Counting(LanguageModel):
    """Every element of every parameter is the number of steps that it was trained."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.large = nn.Parameter(torch.zeros(500, 1000))

    def loss(self, batch: Any) -> Tensor:
        """As before; the large parameter has a gradient, too."""
        return super().loss(batch) + 0 * self.large.mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and count."""
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for x in self.parameters():
                x.fill_(self.trainer.global_step + 1)  # counted when this returns

    def on_train_start(self) -> None:
        """Go on where the checkpoint was."""
        values = [whole(x, keep=True) for x in self.parameters()]
        step = self.trainer.global_step
        assert not step or all((x == step).all() for x in values)


def train(rank: int, meeting: str, options: Mapping[str, Any], folder: Path) -> None:
    """Train and save until the end; leave a message, `said-RANK`."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=limit
    )
    callback = ModelCheckpoint(folder, filename="step", every_n_train_steps=1, save_last=True)
    run = trainer_of(
        rank,
        WORLD,
        CASE,
        {**options, "timeout": limit},
        enable_checkpointing=True,
        callbacks=[callback],
        limit_val_batches=0,
    )
    path = folder / "last.ckpt"
    model = seeded(CASE, kind=Counting)
    try:
        run.fit(model, loaders(CASE)[0], ckpt_path=path if newest(path).exists() else None)
    except BaseException as error:
        (folder / f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def kill_during_save(options: Mapping[str, Any], folder: Path, draw: random.Random) -> str:
    """Start a run, or continue it; kill a rank while it saves; what the other one said.

    Args:
        options: of the strategy.
        folder: of the checkpoints.
        draw: says who is killed, and when.
    """
    path = folder / "last.ckpt"
    before = _identity(path)
    for file in folder.glob("said-*"):
        file.unlink()
    meeting = folder / f"meeting-{before}-{draw.random()}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [
        context.Process(target=train, args=(rank, str(meeting), options, folder))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        _wait(lambda: _identity(path) not in (0, before))
        _wait(lambda: any(folder.glob(".*.new")))
        time.sleep(draw.uniform(0, 0.03))
        culprit = draw.randrange(WORLD)
        killed, other = ranks[culprit], ranks[1 - culprit]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        other.join(2 * TIMEOUT)
        assert other.exitcode not in (None, 0), f"exit code {other.exitcode} after the time-out"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return (folder / f"said-{1 - culprit}").read_text()


def step_of(path: Path) -> int:
    """Step of the newest complete checkpoint of a name, all parts of which are of that step."""
    found = newest(path)
    if found.is_dir():
        content = _load_distributed_checkpoint(found)
        state = content["model"]
    else:
        content = torch.load(found, weights_only=True)
        state = content["state_dict"]
    step = int(content["global_step"])
    for name, value in state.items():
        assert (value == step).all(), f"{name} is not of step {step}"
    return step


def _identity(path: Path) -> int:
    """Which file or folder has a name, 0 if none has: what runs may not be read."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _wait(ready: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, f"nothing saved within {PATIENCE} s"
        time.sleep(0.002)
