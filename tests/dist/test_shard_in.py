"""Batches that the workers of a loader cut: the run is that of batches cut after the hooks."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    SequentialSampler,
    default_collate,
)

from lightning_cp import ContextParallelCollate
from tests._harness.grid import rare, rotated
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
from tests._harness.sources import Broken, List, Own, Pairs, Stream
from tests._harness.trainer import workers_allowed

pytestmark = pytest.mark.dist

CASE = Case(samples=8, lengths=(9, 13), epochs=2, precision="64-true", padding=("left", "right"))
SHORT = replace(CASE, epochs=1)
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Watching(LanguageModel):
    """Remembers what hooks and steps are given."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.given: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.given.append(described(batch))

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.given.append(described(batch))

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Both(Watching):
    """Trains on one batch of each of two loaders."""

    def loss(self, batch: Any) -> Tensor:
        if "a" not in batch:
            return super().loss(batch)
        return super().loss(batch["a"]) + super().loss(batch["b"])

    def fields(self, batch: Any) -> tuple[Any, ...]:
        return super().fields(batch.get("a", batch))


def overriding(base: Any, hook: str) -> Any:
    """A hook that does what that of the base class does."""

    def function(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(base, hook)(self, batch, *args, **kwargs)

    return function


def described(batch: Any) -> Any:
    """Type, names, dtypes and contents."""
    if isinstance(batch, Tensor):
        return str(batch.dtype), batch.tolist()
    if not isinstance(batch, Mapping):
        return batch
    return type(batch).__name__, [(name, described(value)) for name, value in batch.items()]


def collated(samples: list[Any]) -> dict[str, Any]:
    """A collate function of the user's."""
    return {**default_collate(samples), "names": [f"row {len(samples)}"], "nothing": torch.ones(2)}


def renamed(samples: list[Any]) -> dict[str, Any]:
    """A field that nobody declared."""
    return {"tokens": default_collate(samples)["input_ids"]}


def made(kind: str, case: Case, workers: int, strategy: Any) -> Any:
    """The loader for training."""
    data = (Broken if kind == "broken" else Text)(case, case.samples)
    context = "fork" if workers else None  # the pool's own way to start processes is slow
    loader = partial(DataLoader, num_workers=workers, multiprocessing_context=context)
    if kind == "forkserver":
        return DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="forkserver")
    if kind == "batch sampler":
        return loader(data, batch_sampler=Pairs(SequentialSampler(data), 2, False))
    if kind in ("stream", "stream of batches"):
        batches = kind == "stream of batches"
        return loader(Stream(case, batches), batch_size=None if batches else 2)
    if kind == "two":
        other = Text(case, case.samples, first=40)
        return {"a": loader(data, batch_size=2), "b": loader(other, batch_size=2)}
    if kind == "combined":
        return CombinedLoader(loader(data, batch_size=2), "max_size")
    if kind == "own":
        return Own(data, batch_size=2, num_workers=workers, multiprocessing_context=context)
    if kind == "list":
        return List(default_collate([data[i], data[i + 1]]) for i in range(0, len(data), 2))
    shares = kind == "cut" and hasattr(strategy, "share")
    options: dict[str, Any] = {
        "collate": {"collate_fn": collated},
        "unknown": {"collate_fn": renamed},
        "cut": {"collate_fn": ContextParallelCollate(strategy)} if shares else {},
        "persistent": {"persistent_workers": workers > 0},
        "shuffled": {"shuffle": True},
    }.get(kind, {})
    return loader(data, batch_size=2, **options)


class Seen(NamedTuple):
    """A run on one rank.

    Attributes:
        found: what is left of it.
        given: what hooks were given.
        arrived: types of the batches that the strategy got.
        place: what the start table says.
    """

    found: Outcome
    given: list[Any]
    arrived: list[str]
    place: str


class Data(pl.LightningDataModule):
    """Makes the loaders when the strategy is known."""

    def __init__(self, kind: str, case: Case, workers: int) -> None:
        super().__init__()
        self.kind, self.case, self.workers = kind, case, workers

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy if self.trainer is not None else None
        return made(self.kind, self.case, self.workers, strategy)

    def val_dataloader(self) -> Any:
        more = [
            Text(self.case, 4, first=20 + 9 * i) for i in range(2 if self.kind == "many" else 1)
        ]
        context = "fork" if self.workers else None
        options: dict[str, Any] = {"num_workers": self.workers, "multiprocessing_context": context}
        return [DataLoader(data, batch_size=2, **options) for data in more]


def run(
    rank: int,
    world: int,
    case: Case,
    options: dict[str, Any] | None,
    kind: str,
    workers: int,
    hook: str = "",
) -> Seen:
    """Train and validate; a task of the pool.

    Args:
        rank: rank of this process.
        world: number of ranks.
        case: what to run.
        options: of the strategy, None for the plain Trainer.
        kind: of the loader.
        workers: of every loader.
        hook: a transfer hook that the module overrides; it does what the default does.
    """
    base: Any = Both if kind == "two" else Watching
    kind_of_model: Any = type("Model", (base,), {hook: overriding(base, hook)} if hook else {})
    model = kind_of_model(case, dense=options is None)
    model.load_state_dict(seeded(case).state_dict())
    trainer = trainer_of(rank, world, case, options)
    arrived, places = [], []
    strategy: Any = trainer.strategy
    batch_to_device = strategy.batch_to_device

    def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        arrived.append(type(batch).__name__)
        moved = batch_to_device(batch, *args, **kwargs)
        if options is not None:
            places.append(strategy._place.words(batch, trainer._active_loop))
        return moved

    strategy.batch_to_device = noted
    with workers_allowed():
        trainer.fit(model, datamodule=Data(kind, case, workers))
    return Seen(outcome(trainer, model), model.given, arrived, places[0] if places else "")


def refused(rank: int, world: int, *args: Any) -> str:
    """The error of a run; a task of the pool."""
    try:
        run(rank, world, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check(
    kind: str, case: Case, world: int, workers: int, options: dict[str, Any], pool: Any
) -> Any:
    """A run is that of "main", hooks included, and that of the plain Trainer."""
    (plain,) = pool.run(run, case, None, kind, 0, world=1)
    main = pool.run(run, case, {**options, "shard_in": "main"}, kind, 0, world=world)
    found = pool.run(run, case, options, kind, workers, world=world)
    for one, other in zip(found, main, strict=True):
        assert not {"ShardedBatch"} & {*other.arrived} or kind == "cut"
        assert one.given == other.given
        assert (one.found.ids, one.found.counts) == (plain.found.ids, plain.found.counts)
        assert max(furthest(one.found, other.found).values()) == 0
        assert max(furthest(one.found, plain.found).values()) <= 1e-12
    return found


IN_WORKERS = [
    "plain",
    "collate",
    "cut",
    "batch sampler",
    "stream",
    "stream of batches",
    "combined",
    "many",
    "persistent",
]
CASES = [(2, 2, "auto"), (3, 2, "auto"), (2, 0, "worker"), (3, 2, "worker")]


@pytest.mark.parametrize(
    ("kind", "world", "workers", "shard_in"),
    rotated(IN_WORKERS, CASES, rare=("cut", "stream of batches", "combined", "many", "persistent")),
)
def test_what_workers_cut(kind, world, workers, shard_in, pool):
    case = CASE if kind == "persistent" else SHORT
    for found in check(kind, case, world, workers, {"shard_in": shard_in}, pool):
        assert {*found.arrived} == {"ShardedBatch"}
        assert found.place == "by the loader's collate function"


@pytest.mark.parametrize(
    ("kind", "workers", "words"),
    [
        ("plain", 0, "the loader has no workers"),
        ("two", 2, "several loaders make one batch"),
        pytest.param("own", 2, "Own has an __iter__ of its own", marks=pytest.mark.full),
        pytest.param("list", 2, "List is no DataLoader", marks=pytest.mark.full),
    ],
)
def test_what_stays_whole(kind, workers, words, pool):
    for found in check(kind, SHORT, 2, workers, {}, pool):
        assert {*found.arrived[:4]} == {"dict"}
        assert found.place == f"after the transfer hooks ({words})"


@pytest.mark.parametrize(
    "trainer",
    [
        {"overfit_batches": 2},
        pytest.param({"limit_train_batches": 3, "num_sanity_val_steps": 1}, marks=pytest.mark.full),
    ],
)
def test_options_of_the_trainer(trainer, pool):
    case = replace(SHORT, lengths=(9,), shuffle=True, trainer=tuple(trainer.items()))
    for found in check("plain", case, 2, 2, {}, pool):
        assert {*found.arrived} == {"ShardedBatch"}


def test_two_by_two(pool):
    case = replace(SHORT, lengths=(9,))
    expected = pool.run(run, case, None, "shuffled", 0, world=2)
    options = {"context_parallel_size": 2}
    for rank, found in enumerate(pool.run(run, case, options, "shuffled", 1, world=4)):
        assert {*found.arrived} == {"ShardedBatch"}
        assert found.found.ids == expected[rank // 2].found.ids
        assert max(furthest(found.found, expected[rank // 2].found).values()) <= 1e-12


@needs_sharding
def test_sharded_parameters(pool):
    for found in check("plain", SHORT, 2, 2, {"zero_stage": 3, "shard_in": "auto"}, pool):
        assert {*found.arrived} == {"ShardedBatch"}


def test_one_rank_reads_whole_batches_for_all(pool):
    for found in check("plain", SHORT, 2, 2, {"data": "broadcast"}, pool):
        assert {*found.arrived} == {"dict"}
        assert found.place == "after the transfer hooks (data='broadcast')"


@pytest.mark.full
def test_workers_that_are_no_forks(pool):
    found = pool.run(run, SHORT, {}, "forkserver", 0, world=2, timeout=110)
    for one, other in zip(found, pool.run(run, SHORT, {}, "plain", 0, world=2), strict=True):
        assert one.arrived[0] == "ShardedBatch"
        assert max(furthest(one.found, other.found).values()) == 0


@pytest.mark.parametrize("hook", rare(HOOKS, HOOKS[1:]))
def test_an_overridden_hook_sees_whole_batches(hook, pool):
    main = pool.run(run, SHORT, {"shard_in": "main"}, "plain", 0, world=2)
    for found, other in zip(pool.run(run, SHORT, {}, "plain", 1, hook, world=2), main, strict=True):
        assert {*found.arrived} == {"dict"}
        assert found.place == f"after the transfer hooks (overridden: {hook})"
        assert found.given == other.given
    for error in pool.run(refused, SHORT, {"shard_in": "worker"}, "plain", 2, hook, world=2):
        assert error.startswith("RefusedError: shard_in='worker'")
        assert hook in error
        assert "shard_in='auto' or 'main'" in error
        assert "or do what they do in the dataset" in error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("list", "RefusedError: shard_in='worker' .* the loader is a List; use shard_in='auto'"),
        ("two", "BatchError: several loaders give one batch together.* use shard_in='main'"),
    ],
)
def test_what_workers_cannot_cut_is_refused(kind, words, pool):
    for error in pool.run(refused, SHORT, {"shard_in": "worker"}, kind, 2, world=2):
        assert re.match(words, error), error


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_cut_ends_every_rank_in_the_same_words(workers, pool):
    """The rows' only field has a name that nobody knows."""
    found = pool.run(refused, SHORT, {"shard_in": "worker"}, "unknown", workers, world=2)
    main = pool.run(refused, SHORT, {"shard_in": "main"}, "unknown", workers, world=2)
    assert found == main
    assert all("no field of the batch has a sequence dimension" in error for error in found)


def test_a_worker_that_fails_on_one_rank_ends_every_rank(pool):
    first, second = pool.run(
        refused, SHORT, {"timeout": timedelta(seconds=3)}, "broken", 2, world=2
    )
    assert "the disk is gone" in second
    assert first.startswith("PeerError")
    assert "the disk is gone" in first


def again(rank: int, world: int) -> tuple[list[list[int]], list[str]]:
    """One CombinedLoader, whose loaders Lightning replaces, for several runs, in the pool."""
    data = Text(SHORT, 8)
    workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = CombinedLoader(DataLoader(data, batch_size=2, **workers), "max_size_cycle")
    seen, left = [], []
    ways = [{"shard_in": "worker"}, {"shard_in": "main"}, {"data": "broadcast"}]
    for options in [*ways, {"data": "broadcast"}, {}]:
        model = Watching(SHORT)
        trainer = trainer_of(rank, world, SHORT, options)
        with workers_allowed():
            trainer.fit(model, loader)
            if "data" not in options:
                left.append(type(next(iter(loader))[0]).__name__)
        seen.append(model.ids)
    return seen, left


@pytest.mark.full
def test_a_loader_cuts_for_its_own_run_alone(pool):
    for seen, left in pool.run(again, world=2):
        assert seen == 5 * [list(range(8))]
        assert left == 3 * ["dict"]
