"""Runs that go on at another mesh than they were saved at, with the same samples in every step."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from tests._harness.models import Case, Outcome, Text, outcome, seeded, trainer_of
from tests._harness.shared import Shareable, plan

GLOBAL, STEPS = 4, 3
"""Rows of a step on all virtual devices, and steps of an epoch."""


def case_of(precision: str, epochs: int) -> Case:
    """Every sample has as many valid labels, so that the mean of devices is that of all rows."""
    return Case(
        samples=GLOBAL * STEPS,
        batch=GLOBAL,
        epochs=epochs,
        kv_heads=2,
        valid="front",
        precision=precision,
        trainer=(("use_distributed_sampler", False),),
    )


class Place(NamedTuple):
    """A mesh, and how parameters are cut for it.

    Attributes:
        name: of the test.
        dp: virtual devices.
        cp: ranks that share sequences.
        tp: ranks that share layers.
        stage: `zero_stage`; None is the plain Trainer, on several devices with its DDPStrategy.
    """

    name: str
    dp: int = 1
    cp: int = 1
    tp: int = 1
    stage: int | None = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.cp * self.tp

    @property
    def sharded(self) -> bool:
        """Whether folders can be saved."""
        return bool(self.stage) and self.world > 1

    def options(self) -> dict[str, Any] | None:
        """Of the strategy."""
        if self.stage is None:
            return None
        sizes = {"context_parallel_size": self.cp, "data_parallel_size": self.dp}
        found: dict[str, Any] = {**sizes, "zero_stage": self.stage}
        if self.tp > 1:
            found |= {"tensor_parallel_size": self.tp, "tensor_parallel_plan": plan()}
        return found


class Steps(Callback):
    """Counts steps; checkpoints keep how many."""

    count = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One more."""
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What one kept."""
        self.count = state_dict["count"]


class Grouped(Shareable):
    """Its optimizer has two groups, whose parameters are in another order than the module's."""

    def configure_optimizers(self) -> Any:
        """AdamW, whose state has tensors and numbers, or SGD, and a schedule.

        AdamW makes large steps of the rounding errors of gradients that are 0 but for those, as
        that of a bias of keys: in float32 runs without any checkpoint are 4e-3 apart after it.
        """
        biases = [x for x in self.parameters() if x.ndim == 1]
        others = [x for x in self.parameters() if x.ndim > 1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}]
        optimizer: torch.optim.Optimizer
        if self.case.precision == "64-true":
            optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        else:
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def rows(case: Case, place: Place, rank: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of a virtual device: in every step all devices together read the same samples."""
    data = Text(case, case.samples)
    device = rank // (place.cp * place.tp)
    own: DistributedSampler[Any] = DistributedSampler(data, place.dp, device, shuffle=False)
    size = GLOBAL // place.dp
    return DataLoader(data, size, sampler=own), DataLoader(Text(case, GLOBAL, first=99), size)


def save_both(rank: int, world: int, place: Place, precision: str, folder: Path) -> None:
    """Train an epoch; save a file and, where parameters are sharded, a folder."""
    case = case_of(precision, 1)
    model = seeded(case, kind=Grouped)
    run = trainer_of(rank, world, case, place.options(), callbacks=[Steps()])
    run.fit(model, *rows(case, place, rank))
    run.save_checkpoint(folder / "file.ckpt")
    strategy: Any = run.strategy
    if place.sharded:
        strategy._distributed_checkpoint = True
        run.save_checkpoint(folder / "folder.ckpt")


def go_on(rank: int, world: int, place: Place, precision: str, path: Path) -> Outcome:
    """The second epoch, from a checkpoint."""
    case = case_of(precision, 2)
    model = seeded(case, kind=Grouped)
    if precision == "64-true":
        model.double()  # else the plain Trainer reads parameters into float32 first
    with torch.no_grad():
        for x in model.parameters():
            x.add_(1)
    steps = Steps()
    run = trainer_of(rank, world, case, place.options(), callbacks=[steps])
    run.fit(model, *rows(case, place, rank), ckpt_path=path)
    found = outcome(run, model)
    return found._replace(counts={**found.counts, "steps of a callback": steps.count})


def both_epochs(rank: int, world: int, precision: str) -> Outcome:
    """Two epochs of the plain Trainer."""
    case = case_of(precision, 2)
    model = seeded(case, kind=Grouped)
    run = trainer_of(rank, world, case, None)
    run.fit(model, *rows(case, Place("plain", stage=None), rank))
    return outcome(run, model)


def compare(found: list[Outcome], place: Place, whole: Outcome, tolerance: float) -> None:
    """Samples, losses and parameters of the second epoch are those of the uninterrupted run."""
    size, peers = GLOBAL // place.dp, place.cp * place.tp
    devices = found[::peers]
    for step in range(STEPS):
        expected = whole.ids[(STEPS + step) * GLOBAL :][:GLOBAL]
        ids = [x for one in devices for x in one.ids[step * size :][:size]]
        assert (ids if place.dp == 1 else sorted(ids)) == expected, step
    losses = np.mean([one.step_losses for one in devices], axis=0)
    assert np.abs(losses - whole.step_losses[STEPS:]).max() <= tolerance, losses
    for rank, one in enumerate(found):
        assert one.ids == devices[rank // peers].ids
        for name in ("optimiser steps", "steps of a callback"):
            assert one.counts[name] == 2 * STEPS, name
        for name, value in whole.parameters.items():
            off = np.abs(one.parameters[name] - value).max()
            assert off <= tolerance, f"rank {rank} {name}: {off}"
