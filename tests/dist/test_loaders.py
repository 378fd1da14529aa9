"""Loaders of every kind: left as they are, alike on peers, read once, or cut in a worker."""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_cp import ContextParallelCollate, ContextParallelSampler
from lightning_cp.data.collate import ShardedBatch, Share
from lightning_cp.data.cut import Rules
from lightning_cp.errors import BatchError
from tests._harness.models import (
    Case,
    LanguageModel,
    Outcome,
    Text,
    fit,
    furthest,
    outcome,
    seeded,
    trainer_of,
)
from tests._harness.trainer import workers_allowed

pytestmark = pytest.mark.dist

CASE = Case(samples=8, lengths=(9,))
TWO_BY_TWO = {"context_parallel_size": 2}


class Stream(IterableDataset[Any]):
    """Every process gets samples and a length of its own, as users split streams over ranks."""

    def __init__(self, case: Case, rank: int, *, fails: bool = False) -> None:
        self._case, self._rank, self._fails = case, rank, fails

    def __iter__(self) -> Iterator[Any]:
        data = Text(self._case, 100)
        for index in range(6 + 4 * self._rank):
            if self._fails and index == 2:
                raise OSError("the stream broke")
            yield data[index + 10 * self._rank]


class Noisy(Text):
    """Draws a number in the worker."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": torch.rand(2)}


class NoisyModel(LanguageModel):
    """Remembers what workers drew."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.ids += [int(1e6 * x) for x in batch["noise"].flatten()]
        return super().training_step(batch, index)


class InReverse(BatchSampler):
    """A batch sampler of the user's: the last of every batch first."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


class Loading(LanguageModel):
    """Makes its loader when the strategy is known."""

    make: Callable[..., Any]

    def train_dataloader(self) -> Any:
        return type(self).make(self.case, self.trainer.strategy)


def with_sampler(case: Case, strategy: Any) -> Any:
    data = Text(case, case.samples)
    sampler = ContextParallelSampler(data, strategy, shuffle=True, seed=3)
    return DataLoader(data, batch_size=2, sampler=sampler)


def with_collate(case: Case, strategy: Any, workers: int = 0) -> Any:
    data = Text(case, case.samples)
    collate = ContextParallelCollate(strategy)
    context = "fork" if workers else None
    return DataLoader(
        data,
        batch_size=2,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context=context,
    )


def with_workers(case: Case, strategy: Any) -> Any:
    return with_collate(case, strategy, 2)


def in_reverse(case: Case, strategy: Any) -> Any:
    data = Text(case, case.samples)
    return DataLoader(data, batch_sampler=InReverse(SequentialSampler(data), 2, False))


def train(
    rank: int,
    world: int,
    case: Case,
    options: dict[str, Any] | None,
    make: Callable[..., Any],
    trainer: dict[str, Any],
) -> Outcome:
    """Train on what `make` gives; a task of the pool."""
    kind: Any = type("Loading", (Loading,), {"make": make})
    model = kind(case)
    model.load_state_dict(seeded(case).state_dict())
    runner = trainer_of(rank, world, case, options, **trainer)
    with workers_allowed():
        runner.fit(model)
    return outcome(runner, model)


def close(found: Outcome, expected: Outcome, tolerance: float = 1e-6) -> None:
    assert found.ids == expected.ids
    assert found.counts == expected.counts
    assert max(furthest(found, expected).values()) <= tolerance


def stream(
    rank: int, world: int, options: dict[str, Any] | None, fails: bool
) -> tuple[Outcome | None, str]:
    """Train on a stream that differs by rank; a task of the pool."""
    model = seeded(CASE)
    trainer = trainer_of(rank, world, CASE, options)
    loader = DataLoader(Stream(CASE, rank, fails=fails), batch_size=2)
    try:
        trainer.fit(model, loader, DataLoader(Stream(CASE, 0), batch_size=2))
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return outcome(trainer, model), ""


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_reads_a_stream_for_all(world, pool):
    ((expected, _),) = pool.run(stream, None, False, world=1)
    assert expected.ids == list(range(6))
    for found, error in pool.run(stream, {"data": "broadcast"}, False, world=world):
        assert found is not None, error
        assert found.ids == expected.ids
        assert max(furthest(found, expected).values()) <= 1e-6


def test_streams_that_differ_are_refused_without_it(pool):
    for _, error in pool.run(stream, {}, False, world=2):
        assert "contents of the batch" in error


def test_a_broken_stream_ends_every_rank(pool):
    (_, first), (_, second) = pool.run(stream, {"data": "broadcast"}, True, world=2)
    assert "the stream broke" in first
    assert second.startswith("PeerError")
    assert "OSError: the stream broke" in second


@pytest.mark.parametrize("data", ["check", "broadcast"])
def test_two_by_two_reads_what_two_devices_read(data, pool):
    case = replace(CASE, shuffle=True, epochs=2)
    expected = pool.run(fit, case, None, world=2)
    options = {**TWO_BY_TWO, "data": data}
    for rank, found in enumerate(pool.run(fit, case, options, world=4)):
        close(found, expected[rank // 2])


class Dealing(Text):
    """Deals its samples out by itself, as the streams of litdata do."""

    def __init__(self, case: Case, share: tuple[int, int]) -> None:
        super().__init__(case, case.samples)
        self.distributed_env = SimpleNamespace(global_rank=share[0], world_size=share[1])

    def __len__(self) -> int:
        return super().__len__() // self.distributed_env.world_size

    def __getitem__(self, index: int) -> Any:
        dealt = self.distributed_env
        return super().__getitem__(index * dealt.world_size + dealt.global_rank)


def deal(rank: int, world: int, data: str, right: bool) -> Outcome:
    """A run with a dataset that deals to the virtual device, or to every rank; a task."""
    cp = world // 2 if world == 4 else world
    share = (rank // cp, world // cp) if right else (rank, world)
    model = seeded(CASE)
    options = {"context_parallel_size": cp, "data": data}
    trainer = trainer_of(rank, world, CASE, options, use_distributed_sampler=False)
    trainer.fit(model, DataLoader(Dealing(CASE, share), batch_size=2))
    return outcome(trainer, model)


@pytest.mark.parametrize("data", ["check", "broadcast"])
def test_a_dataset_that_deals_to_ranks_is_refused(data, pool):
    for rank, failure in enumerate(pool.failures(deal, data, False, world=2)):
        assert failure.kind == "RefusedError"
        assert f"gives this process share {rank} of 2, but each of the 1 virtual" in failure.message
        assert "set dataset.distributed_env.world_size" in failure.message


def test_a_dataset_that_deals_to_virtual_devices(pool):
    for rank, found in enumerate(pool.run(deal, "check", True, world=4)):
        assert found.ids == list(range(rank // 2, CASE.samples, 2))


def untouched(rank: int, world: int) -> tuple[list[int], list[str]]:
    """One loader for training, validation and another run; a task of the pool."""
    loader = DataLoader(Text(CASE, 8), batch_size=2)
    before, seen = dict(vars(loader)), []
    os.environ["PL_SEED_WORKERS"] = "1"
    try:
        for _ in range(2):
            model = seeded(CASE)
            trainer = trainer_of(rank, world, CASE, {}, num_sanity_val_steps=1)
            trainer.fit(model, loader, loader)
            trainer.predict(Predicting(CASE), loader)
            seen += model.ids
    finally:
        os.environ["PL_SEED_WORKERS"] = "0"
    return seen, [name for name, value in vars(loader).items() if before.get(name) is not value]


class Predicting(LanguageModel):
    """Returns the ids."""

    def predict_step(self, batch: Any, index: int) -> Any:
        self.loss(batch)
        return batch["id"]


class Validating(LanguageModel):
    """Takes the index of its validation loader."""

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def test_loaders_are_left_as_they_are(pool):
    for seen, changed in pool.run(untouched, world=2):
        assert seen == 2 * list(range(8))
        assert changed == []


def noise(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    """What workers drew; a task of the pool."""
    pl.seed_everything(7, workers=True, verbose=False)
    try:
        model = NoisyModel(CASE)
        data = Noisy(CASE, 8)
        loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
        with workers_allowed():
            trainer_of(rank, world, CASE, options).fit(model, loader)
    finally:
        os.environ["PL_SEED_WORKERS"] = "0"
    return model.ids


def test_workers_of_peers_draw_the_same_and_those_of_devices_do_not(pool):
    one, two, three, four = pool.run(noise, TWO_BY_TWO, world=4)
    assert one == two
    assert three == four
    assert not {*one} & {*three}


@pytest.mark.parametrize("make", [with_collate, with_workers])
@pytest.mark.parametrize(
    ("world", "options"), [(3, {}), pytest.param(4, TWO_BY_TWO, marks=pytest.mark.full)]
)
def test_cutting_in_the_collate_function(make, world, options, pool):
    expected = pool.run(fit, CASE, options, world=world)
    for found, one in zip(
        pool.run(train, CASE, options, make, {}, world=world), expected, strict=True
    ):
        assert found.ids == one.ids
        assert found.counts == one.counts
        for name, value in one.parameters.items():
            assert (found.parameters[name] == value).all(), name


def test_one_device_collates_as_always(pool):
    ((found,), (expected,)) = (
        pool.run(train, CASE, options, with_collate, {}, world=1)
        for options in ({}, {"layout": "zigzag"})
    )
    close(found, expected, 0)


def test_a_sampler_for_loaders_that_are_left_alone(pool):
    found = pool.run(
        train, CASE, TWO_BY_TWO, with_sampler, {"use_distributed_sampler": False}, world=4
    )
    for rank, one in enumerate(found):
        data = Text(CASE, 8)
        sampler = DistributedSampler(data, num_replicas=2, rank=rank // 2, shuffle=True, seed=3)
        assert one.ids == list(sampler)


class Device:
    """The second of three virtual devices."""

    data_parallel_size, data_parallel_rank = 3, 1


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"seed": 4, "drop_last": True}])
def test_the_sampler_is_that_of_torch(options):
    found = ContextParallelSampler(range(11), Device(), **options)  # type: ignore[arg-type]
    expected = DistributedSampler(range(11), num_replicas=3, rank=1, **options)  # type: ignore[arg-type]
    for epoch in range(2):
        found.set_epoch(epoch)
        expected.set_epoch(epoch)
        assert list(found) == list(expected)
    assert len(found) == len(expected)


def test_a_batch_sampler_of_the_user(pool):
    for found in pool.run(train, CASE, {}, in_reverse, {}, world=2):
        assert found.ids == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"limit_train_batches": 2}, 4),
        ({"limit_train_batches": 0.75}, 6),
        ({"overfit_batches": 1}, 2),
    ],
)
def test_limits(options, count, pool):
    case = replace(CASE, trainer=tuple(options.items()))
    (expected,) = pool.run(fit, case, None, world=1)
    assert len(expected.ids) == count
    for found in pool.run(fit, case, {}, world=2):
        close(found, expected)


def combined(rank: int, world: int, options: dict[str, Any] | None, mode: str) -> dict[str, float]:
    """Validate on two loaders, one after the other or together; a task of the pool."""
    data = [DataLoader(Text(CASE, 4 + 2 * i, first=9 * i), batch_size=2) for i in range(2)]
    trainer = trainer_of(rank, world, CASE, options)
    model = Validating(CASE)
    model.load_state_dict(seeded(CASE).state_dict())
    trainer.validate(model, CombinedLoader(data, mode), verbose=False)  # type: ignore[arg-type]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_several_loaders(pool):
    (expected,) = pool.run(combined, None, "sequential", world=1)
    assert set(expected) == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    for options in ({}, {"data": "broadcast"}):
        for found in pool.run(combined, options, "sequential", world=2):
            assert found == pytest.approx(expected, rel=1e-6)


def shared_object(samples: list[Any], share: Any = None) -> Any:
    class Sharing:
        def share(self, module: Any = None) -> Any:
            return share

    return ContextParallelCollate(Sharing())(samples)


def test_a_sharded_batch_cannot_be_changed_and_moves_as_a_whole():
    samples = [Text(CASE, 4)[index] for index in range(2)]
    assert not isinstance(shared_object(samples), ShardedBatch)
    found = shared_object(samples, Share(Rules(layout="zigzag"), 1, 2))
    assert isinstance(found, ShardedBatch)
    assert found.batch["input_ids"].shape == (2, 4)
    with pytest.raises(AttributeError, match="cannot be changed"):
        found.code = 3
    moved, copied = found.to("meta"), copy.deepcopy(found)
    assert moved.batch["input_ids"].is_meta
    assert (moved.code, moved.shapes, moved.layout) == (found.code, found.shapes, "zigzag")
    assert torch.equal(copied.batch["labels"], found.batch["labels"])
    found.check(rank=1, world=2)
    with pytest.raises(BatchError, match="cut for rank 1 of 2, and arrived on rank 0 of 2"):
        found.check(rank=0, world=2)
