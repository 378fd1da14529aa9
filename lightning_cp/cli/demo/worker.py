"""`python -m lightning_cp.cli.demo.worker JOB`: trains the demo's model once.

A program of its own: Lightning starts it again for every further rank, and thread counts,
environment and filtered warnings stay in here.
"""

import logging
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.cli.demo.data import Windows
from lightning_cp.cli.demo.job import Job, RankResult
from lightning_cp.cli.demo.model import DemoGPT
from lightning_cp.diagnostics.trace import MemoryTracker
from lightning_cp.errors import ContextParallelError

EXPECTED_WARNINGS = (
    # Lightning's advice on speed; the demo's loader only slices a tensor.
    ".*does not have many workers which may be a bottleneck",
    # Lightning calls torch's pytree by a name that torch has since deprecated.
    r".isinstance\(treespec, LeafSpec\). is deprecated",
)


class Recorder(Callback):
    """The losses of all steps, and the peak memory of one in the middle.

    Args:
        max_steps: steps of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self._watched = max_steps // 2
        self._tracker: MemoryTracker | None = None
        self._watching = ExitStack()
        self._losses: list[float] = []
        self._tokens = self._work = self._peak = 0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Dummy tokens, which fill up very short sequences, have no label.
        held = batch["position_ids"][batch["labels"] >= 0]
        self._tokens, self._work = held.numel(), int((held + 1).sum())
        if trainer.global_step == self._watched:
            self._tracker = MemoryTracker(pl_module.parameters())
            self._watching.enter_context(self._tracker)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._tracker is not None:
            self._watching.close()
            self._tracker.close()
            self._peak, self._tracker = self._tracker.peak, None

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._losses.append(float(outputs["loss"]))

    def result(self) -> RankResult:
        """What was recorded."""
        return RankResult(
            losses=self._losses,
            tokens=self._tokens,
            work=self._work,
            peak_bytes=self._peak,
        )


def main() -> int:
    """Train as the job file says and write this rank's result.

    Returns:
        The exit code: 0, or 2 after an error of this package, which is printed in one line.
    """
    _be_quiet()
    try:
        _train(Job.load(Path(sys.argv[1])))
    except ContextParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _train(job: Job) -> None:
    torch.manual_seed(job.seed)
    windows = Windows(Path(job.text).read_bytes(), job.seqlen)
    recorder = Recorder(job.max_steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=job.devices,
        strategy=job.strategy,
        max_steps=job.max_steps,
        max_epochs=-(-job.max_steps // len(windows)),
        gradient_clip_val=1.0,
        plugins=[LightningEnvironment()],  # whatever cluster this machine belongs to
        callbacks=[recorder, RichProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=job.results,
    )
    trainer.fit(DemoGPT(), DataLoader(windows, batch_size=1))
    recorder.result().save(Path(job.results), trainer.global_rank)


def _be_quiet() -> None:
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
