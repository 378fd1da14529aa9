"""A run that stops in the middle of an epoch continues with the very next batch."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_cp.fsdp import whole
from tests._harness.grid import rare
from tests._harness.models import (
    Case,
    LanguageModel,
    Outcome,
    Text,
    furthest,
    outcome,
    seeded,
    trainer_of,
)
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import workers_allowed

pytestmark = pytest.mark.dist

CASE = Case(samples=8, lengths=(8,), epochs=2, momentum=0.9)
STEPS, EPOCH = 4, "train_loss_epoch"
WITHIN, AT_END, IN_SECOND = 2, 4, 5
"""Steps after which a run stops: in its first epoch, at the end of it, in its second."""


class Reading(Text):
    """Remembers what was read; without workers that is in this process."""

    def __init__(self, case: Case, samples: int) -> None:
        super().__init__(case, samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


class Two(LanguageModel):
    """Trains on one batch of each of two loaders."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["a"]) + super().loss(batch["b"])

    def fields(self, batch: Any) -> tuple[Any, ...]:
        if isinstance(batch, Mapping) and "a" in batch:
            return None, None, torch.cat([batch["a"]["id"], batch["b"]["id"]])
        return super().fields(batch)


class Stateful:
    """A loader that knows its own position, as those of torchdata do."""

    def __init__(self, samples: list[Any]) -> None:
        self._loader, self._taken, self._skip = DataLoader(samples, batch_size=2), 0, 0

    def __iter__(self) -> Any:
        skip, self._skip = self._skip, 0
        for index, batch in enumerate(self._loader):
            if index >= skip:
                self._taken = index + 1
                yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skip = state["taken"] % len(self)


def loader_of(kind: str, data: Text, workers: int) -> Any:
    if kind == "subset":
        sampler = SubsetRandomSampler(range(len(data)))
        return DataLoader(data, batch_size=2, sampler=sampler)
    if kind == "generator":
        generator = torch.Generator().manual_seed(5)
        return DataLoader(data, batch_size=2, shuffle=True, generator=generator)
    if kind == "stateful":
        return Stateful([data[index] for index in range(len(data))])
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(
            data,
            batch_size=2,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
    if kind == "two":
        other = Text(CASE, 6, first=40)
        return {
            "a": DataLoader(data, batch_size=2, shuffle=True),
            "b": DataLoader(other, batch_size=2, shuffle=True),
        }
    context = "fork" if workers else None  # the pool's own way to start processes is slow
    return DataLoader(
        data,
        batch_size=2,
        shuffle=kind == "shuffled",
        num_workers=workers,
        multiprocessing_context=context,
    )


class Run(NamedTuple):
    """What was trained on, what was read, and warnings."""

    found: Outcome
    read: list[int]
    warnings: list[str]


def run(
    rank: int,
    world: int,
    options: dict[str, Any] | None,
    kind: str,
    workers: int,
    folder: Path,
    resume: Path | None,
) -> Run:
    """Train, and save after every step; a task of the pool."""
    case = replace(CASE, samples=8 * (2 if options and "data_parallel_size" in options else 1))
    model = (Two if kind == "two" else LanguageModel)(case)
    model.load_state_dict(seeded(case).state_dict())
    data = Reading(case, case.samples)
    callback = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=-1 if resume is None else 0, filename="{step}"
    )
    trainer = trainer_of(
        rank, world, case, options, enable_checkpointing=True, callbacks=[callback]
    )
    with warnings.catch_warnings(record=True) as said, workers_allowed():
        warnings.simplefilter("always")
        trainer.fit(model, loader_of(kind, data, workers), ckpt_path=resume)
        before = len(warnings.filters)
    assert before <= len(warnings.filters) + 1
    return Run(outcome(trainer, model), data.read, [str(x.message) for x in said])


def check(found: Outcome, whole: Outcome, step: int, rows: int = 2) -> None:
    """The rest of a run, as it was without a stop."""
    assert found.ids == whole.ids[rows * step :]
    assert found.counts == whole.counts
    rest = whole._replace(step_losses=whole.step_losses[step:])
    if step > STEPS:  # Lightning forgets what was logged in the first part of an epoch
        known = {n: x for n, x in rest.metrics.items() if n not in ("train_loss", EPOCH)}
        rest = rest._replace(metrics=known)
    distances = furthest(found, rest)
    assert max(distances.values()) <= 1e-6, distances


SAME = [
    pytest.param("cp2", "in-order", 0, marks=pytest.mark.full),
    pytest.param("cp2", "in-order", 2, marks=pytest.mark.full),
    ("cp2", "shuffled", 0),
    pytest.param("cp2", "shuffled", 2, marks=pytest.mark.full),
    ("cp3", "subset", 0),
    pytest.param("cp2", "generator", 0, marks=pytest.mark.full),
    pytest.param("cp2", "two", 0, marks=pytest.mark.full),
    ("cp2", "stateful", 0),
    pytest.param("cp2", "torchdata", 0, marks=pytest.mark.full),
    pytest.param("cp2", "torchdata", 2, marks=pytest.mark.full),
]
WORLDS = {"cp2": 2, "cp3": 3}


@pytest.mark.parametrize(("mesh", "kind", "workers"), SAME)
def test_the_rest_of_a_run_is_the_same(mesh, kind, workers, pool, tmp_path):
    if kind == "torchdata":
        pytest.importorskip("torchdata.stateful_dataloader")
    world = WORLDS[mesh]
    whole = pool.run(run, {}, kind, workers, tmp_path, None, world=world)
    rows = 4 if kind == "two" else 2
    assert len(whole[0].found.ids) == 2 * STEPS * rows
    stops = (WITHIN, AT_END, IN_SECOND) if kind in ("in-order", "shuffled") else (WITHIN, IN_SECOND)
    for step in stops if workers == 0 else (WITHIN,):
        file = tmp_path / f"step={step}.ckpt"
        rest = pool.run(run, {}, kind, workers, tmp_path / "other", file, world=world)
        for found, expected in zip(rest, whole, strict=True):
            check(found.found, expected.found, step, rows)
            assert not any("not resumable" in x for x in found.warnings)
            if workers == 0 and kind in ("in-order", "shuffled", "subset", "generator"):
                assert found.read == expected.found.ids[2 * step :], "the rest alone is read"


@pytest.mark.parametrize("workers", rare([0, 2], [0]))
def test_another_number_of_ranks_per_device(workers, pool, tmp_path):
    """Samples are those of the same two virtual devices."""
    one, two = {"data_parallel_size": 2}, {"data_parallel_size": 2, "context_parallel_size": 2}
    whole = pool.run(run, one, "in-order", workers, tmp_path, None, world=2)
    file = tmp_path / f"step={IN_SECOND}.ckpt"
    rest = pool.run(run, two, "in-order", workers, tmp_path / "other", file, world=4)
    for rank, found in enumerate(rest):
        check(found.found, whole[rank // 2].found, IN_SECOND)
        assert not any("not resumable" in x for x in found.warnings)
    assert not set(whole[0].found.ids[: 2 * STEPS]) & set(whole[1].found.ids[: 2 * STEPS])


def test_the_plain_trainer_does_not_mind(pool, tmp_path):
    """It begins the epoch anew, as it does with its own checkpoints."""
    pool.run(run, {}, "in-order", 0, tmp_path, None, world=2)
    file = tmp_path / f"step={WITHIN}.ckpt"
    (found,) = pool.run(run, None, "in-order", 0, tmp_path / "other", file, world=1)
    assert found.found.ids[:4] == [0, 1, 2, 3]
    assert any("not resumable" in x for x in found.warnings)


def test_a_checkpoint_of_the_plain_trainer_begins_the_epoch_anew(pool, tmp_path):
    pool.run(run, None, "in-order", 0, tmp_path, None, world=1)
    file = tmp_path / f"step={WITHIN}.ckpt"
    for found in pool.run(run, {}, "in-order", 0, tmp_path / "other", file, world=2):
        assert found.found.ids[:4] == [0, 1, 2, 3]
        assert len(found.found.ids) == 4 + 2 * STEPS


def test_another_number_of_devices_begins_the_epoch_anew_and_says_so(pool, tmp_path):
    pool.run(run, {}, "in-order", 0, tmp_path, None, world=2)
    options = {"data_parallel_size": 2, "context_parallel_size": 1}
    file = tmp_path / f"step={WITHIN}.ckpt"
    found = pool.run(run, options, "in-order", 0, tmp_path / "other", file, world=2)
    assert any("data_parallel_size=1 and is loaded on 2" in x for x in found[0].warnings)
    ended = tmp_path / f"step={AT_END}.ckpt"
    ends = pool.run(run, options, "in-order", 0, tmp_path / "o", ended, world=2)
    assert not any("is loaded on" in x for x in ends[0].warnings)


class Restored(LanguageModel):
    """Remembers the parameters that training begins with."""

    first: Mapping[str, Tensor]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.first = {n: whole(p, keep=True).clone() for n, p in self.named_parameters()}


def restored(
    rank: int, world: int, options: dict[str, Any] | None, double: bool, file: Path
) -> tuple[bool, bool]:
    """Whether parameters are those of the checkpoint, and those rounded to float32; a task."""
    case = Case(samples=4, lengths=(8,), precision="64-true")
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(seeded(case), DataLoader(Text(case, 4), batch_size=2))
    trainer.save_checkpoint(file)
    model = Restored(case)
    if double:
        model.double()
    more = trainer_of(rank, world, replace(case, epochs=2), options)
    more.fit(model, DataLoader(Text(case, 4), batch_size=2), ckpt_path=file)
    saved = torch.load(file, weights_only=True)["state_dict"]
    pairs = [(saved[name], value) for name, value in model.first.items()]
    assert all(x.dtype == y.dtype == torch.float64 for x, y in pairs)
    exact = all(torch.equal(x, y) for x, y in pairs)
    return exact, all(torch.equal(x.float().double(), y) for x, y in pairs)


@pytest.mark.parametrize(
    ("options", "double", "exact"),
    [
        (None, False, False),
        (None, True, True),
        ({"zero_stage": 0}, False, False),
        ({"zero_stage": 0}, True, True),
        pytest.param({"zero_stage": 3}, False, True, marks=needs_sharding),
    ],
    ids=["plain", "plain-double", "zero0", "zero0-double", "zero3"],
)
def test_float64_passes_through_the_dtype_of_the_module(options, double, exact, pool, tmp_path):
    """Lightning reads a checkpoint into the module before `precision="64-true"` converts it."""
    world = 1 if options is None else 2
    for found in pool.run(restored, options, double, tmp_path / "saved.ckpt", world=world):
        assert found == (exact, not exact)
