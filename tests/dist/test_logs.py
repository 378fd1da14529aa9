"""Logged values equal those of the plain Trainer, whatever a rank computed from its own tokens."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_cp.errors import MismatchError, PeerError
from tests._harness.grid import rotated
from tests._harness.models import IGNORED, Case, LanguageModel, loaders, seeded, trainer_of
from tests._harness.pool import Pool

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.*sync_dist=True"),
]

Values = dict[str, float]


class Logging(LanguageModel):
    """Logs values of its own tokens, of the group and of the rows, with every reduction."""

    def __init__(self, case: Case, dense: bool, sync_dist: bool) -> None:
        super().__init__(case, dense)
        self.sync_dist = sync_dist
        self.steps: list[Values] = []

    def values(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        tokens, labels, ids, *rest = self.fields(batch)
        logits = self.net(tokens, *rest)
        valid = labels != IGNORED
        with torch.no_grad():
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            right = (logits.argmax(-1) % 7 == labels % 7)[valid].to(logits.dtype)
            scores = logits.amax(-1)[valid]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), {
            "loss": loss,
            "perplexity": loss.exp(),
            "accuracy": right.mean(),
            "number": float(scores.mean()),
            "valid (sum)": valid.sum().to(logits.dtype),
            "rows (sum)": float(len(ids)),
            "highest (max)": scores.max() if len(scores) else torch.tensor(-torch.inf),
            "lowest (min)": scores.min() if len(scores) else torch.tensor(torch.inf),
        }

    def write(self, name: str, values: dict[str, Any], **options: Any) -> None:
        reductions = {"sum": torch.sum, "max": "max", "min": min}
        for key, value in values.items():
            word = key.partition("(")[2].rstrip(")")
            how = {"reduce_fx": reductions[word]} if word else {}
            settings = {"on_step": True, "on_epoch": True, "sync_dist": self.sync_dist}
            self.log(f"{name}_{key}", value, **{**settings, **how, **options})

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss, values = self.values(batch)
        self.write("train", values)
        self.log_dict({"a": values["number"], "b": values["accuracy"]}, on_epoch=True)
        if not self.automatic_optimization:
            self._optimise(loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.write("val", self.values(batch)[1])

    test_step = validation_step

    def remember(self, *args: Any) -> None:
        found = self.trainer._results.metrics(on_step=True)["log"]
        self.steps.append({name: float(value) for name, value in found.items()})

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = remember


def run(
    rank: int,
    world: int,
    case: Case,
    options: Mapping[str, Any] | None,
    sync_dist: bool,
) -> tuple[list[Values], Values]:
    """Train and validate; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    model = Logging(case, options is None, sync_dist)
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(model, *loaders(case))
    return model.steps, {name: float(x) for name, x in trainer.callback_metrics.items()}


def same(found: Values, expected: Values, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = 8 * tolerance if "perplexity" in name else tolerance  # exp multiplies by the loss
        limit = 0 if "(sum)" in name else limit
        assert found[name] == pytest.approx(value, rel=limit), name


CASES = {
    "uneven": Case(samples=12, precision="32-true"),
    "odd-length": Case(samples=12, lengths=(23,), precision="32-true"),
    # Labels on the first two positions alone: the other ranks have none, and log NaN.
    "empty-rank": Case(samples=12, valid="front", precision="32-true"),
    "manual": Case(samples=12, optimisation="manual", precision="64-true"),
    "padded": Case(samples=12, padding=("left", "right"), precision="64-true"),
}
TOLERANCE = {"32-true": 1e-6, "64-true": 1e-12}


@pytest.fixture(scope="module")
def plain(pool: Pool) -> Any:
    """What the plain Trainer on `dp` devices logs, once for each case."""
    found: dict[Any, Any] = {}

    def run_once(case: Case, dp: int, sync_dist: bool) -> Any:
        key = case, dp, sync_dist
        if key not in found:
            found[key] = pool.run(run, case, None, sync_dist, world=dp)
        return found[key]

    return run_once


GRID = [
    *((name, dp, cp) for name in ("uneven", "empty-rank") for dp, cp in ((1, 2), (1, 3), (2, 2))),
    ("odd-length", 2, 2),
    ("manual", 1, 2),
    ("padded", 1, 3),
]


@pytest.mark.parametrize(
    ("row", "sync_dist"), rotated(GRID, [(False,), (True,)]), ids=lambda x: str(x)
)
def test_values_are_those_of_the_plain_trainer(row, sync_dist, pool, plain):
    name, dp, cp = row
    case = CASES[name]
    expected = plain(case, dp, sync_dist)
    options = {"context_parallel_size": cp, "layout": "contiguous"}
    for rank, (steps, ends) in enumerate(
        pool.run(run, case, options, sync_dist, world=dp * cp),
    ):
        one_steps, one_ends = expected[rank // cp]
        assert len(steps) == len(one_steps) > 2
        for found, one in zip(steps, one_steps, strict=True):
            same(found, one, TOLERANCE[case.precision])
        assert len(one_ends) > 40
        same(ends, one_ends, TOLERANCE[case.precision])


def test_local_values_differ_from_the_plain_trainer(pool, plain):
    """What is compared above is not trivial: epochs differ from steps, and devices differ."""
    (one_steps, _), (other_steps, _) = plain(CASES["uneven"], 2, False)
    for name in ("train_accuracy_step", "train_valid (sum)_step", "train_highest (max)_step"):
        assert one_steps[0][name] != one_steps[1][name], name
        assert one_steps[0][name] != other_steps[0][name], name


class Options(Logging):
    """Logs in the ways that differ from the ordinary one."""

    def validation_step(self, batch: Any, index: int) -> None:
        values = self.values(batch)[1]
        valid = int(values["valid (sum)"])
        tokens = self.fields(batch)[0]
        self.log("accuracy", values["accuracy"], batch_size=valid)
        self.log("tokens", tokens.numel(), reduce_fx="sum")
        self.log("early", values["number"])
        self.log("early", 3 * values["number"])
        if index % 2:
            self.log("odd", values["number"])
        if self.trainer.is_global_zero:
            self.log("mine", 5.0, rank_zero_only=True)
        for name in range(20):
            self.log(f"many{name}", values["number"] + name)

    def on_validation_epoch_end(self) -> None:
        self.log("end", float(self.global_rank), sync_dist=True)
        self.log("ends", 3.0, reduce_fx="sum", sync_dist=True)


def validate(rank: int, world: int, case: Case, options: Any) -> Values:
    """Validate with `Options`; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    model = Options(case, options is None, False)
    trainer = trainer_of(rank, world, case, options)
    trainer.validate(model, loaders(case)[1], verbose=False)
    return {name: float(x) for name, x in trainer.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore:You called .self.log.'tokens'.*needs to be floating")
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (1, 3), (2, 2)])
def test_options_of_log(dp, cp, pool):
    case = Case(lengths=(23,), precision="64-true")
    expected = pool.run(validate, case, None, world=dp)
    options = {"context_parallel_size": cp, "layout": "contiguous"}
    for rank, found in enumerate(pool.run(validate, case, options, world=dp * cp)):
        one = expected[rank // cp]
        if rank and "mine" not in found:
            one = {name: value for name, value in one.items() if name != "mine"}
        # Outside of steps a rank logs what it has, as on one device; devices share means.
        assert found.pop("end") == (rank if dp == 1 else (dp * cp - 1) / 2)
        same(found, {name: x for name, x in one.items() if name != "end"}, 1e-12)
        assert found["ends"] == 3.0 * dp


class Forgets(Logging):
    """One rank logs less."""

    def validation_step(self, batch: Any, index: int) -> None:
        values = self.values(batch)[1]
        self.log("always", values["loss"])
        if self.global_rank != 1:
            self.log("sometimes", values["loss"])


def forget(rank: int, world: int, other: str) -> None:
    """Validate with a key that rank 1 does not log; a task of the pool."""
    case = Case()
    pl.seed_everything(7, verbose=False)
    model = Forgets(case, False, False)
    trainer_of(rank, world, case, {}).validate(model, loaders(case)[1], verbose=False)


def test_a_key_that_a_rank_does_not_log_stops_all_ranks(pool):
    for failure in pool.failures(forget, "", world=3):
        assert failure.kind == MismatchError.__name__
        assert "rank 1 did not log 'sometimes (mean)'" in failure.message
        assert "rank_zero_only=True" in failure.message


def monitored(rank: int, world: int, case: Case, options: Any, folder: str) -> tuple[Any, ...]:
    """Train until the accuracy of a rank's own tokens stops growing; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    model = Logging(case, options is None, False)
    stop = EarlyStopping("val_accuracy", patience=1, mode="max")
    keep = ModelCheckpoint(folder, "{epoch}", "val_accuracy", mode="max", save_top_k=1)
    more = {"callbacks": [stop, keep], "max_epochs": 8, "enable_checkpointing": True}
    trainer = trainer_of(rank, world, case, options, **more)
    trainer.fit(model, *loaders(case))
    score = float(keep.best_model_score)
    return trainer.current_epoch, stop.wait_count, score, keep.best_model_path.rpartition("/")[2]


def test_callbacks_act_on_the_values_of_the_group(pool, tmp_path):
    case = Case(samples=4, precision="64-true")
    (expected,) = pool.run(monitored, case, None, str(tmp_path / "one"), world=1)
    assert 1 < expected[0] < 8
    for found in pool.run(monitored, case, {"layout": "contiguous"}, str(tmp_path), world=2):
        assert found == (*expected[:2], pytest.approx(expected[2], rel=1e-12), expected[3])


def fit_sequences(rank: int, world: int, options: Any) -> Values:
    """Validate batches whose dim 0 is the sequence; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    case = Case(precision="64-true", positions="functional")
    model = SequenceFirst(case, options is None, False)
    rows = [torch.arange(n)[:, None] for n in (23, 9)]
    trainer = trainer_of(rank, world, case, options)
    trainer.validate(model, torch.utils.data.DataLoader(rows, batch_size=None), verbose=False)
    return {name: float(x) for name, x in trainer.callback_metrics.items()}


class SequenceFirst(Logging):
    """Takes `[S, 1]` tokens."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("score", self.net(batch.T).mean())


def test_epochs_are_weighted_as_by_the_plain_trainer_where_the_sequence_comes_first(pool):
    (expected,) = pool.run(fit_sequences, None, world=1)
    options = {"sequence_dims": {"": 0}, "layout": "contiguous"}
    for found in pool.run(fit_sequences, options, world=3):
        same(found, expected, 1e-12)


class Fails(Logging):
    """One rank fails after it has logged."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.write("val", self.values(batch)[1])
        if self.global_rank == 1:
            raise KeyError("only here")


def fail(rank: int, world: int) -> None:
    pl.seed_everything(7, verbose=False)
    case = Case()
    model = Fails(case, False, False)
    trainer = trainer_of(rank, world, case, {"timeout": timedelta(seconds=5)})
    trainer.validate(model, loaders(case)[1], verbose=False)


def test_a_rank_that_fails_is_named_by_the_others(pool):
    found = pool.failures(fail, world=2)
    assert [x.kind for x in found] == [PeerError.__name__, "KeyError"]
    assert "rank 1 stopped with KeyError" in found[0].message


def test_one_device_logs_as_ever(pool):
    case = CASES["uneven"]
    (found,), (expected,) = (pool.run(run, case, x, True, world=1) for x in ({}, None))
    assert found == expected


def pieces(rank: int, world: int) -> list[bool]:
    """What a module's `log` is while a step runs, and after the run; a task of the pool."""
    case, model = Case(), seeded(Case())
    trainer_of(rank, world, case, {}).fit(model, loaders(case)[0])
    return ["log" in vars(model), bool(np.isfinite(model.logged).all())]


def test_nothing_is_left_behind(pool):
    first, second = pool.run(pieces, world=2)
    assert first == second == [False, True]


class Gathers(Logging):
    """Gathers over virtual devices."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.values(batch)
        place = torch.tensor([float(self.device_index)], requires_grad=True)
        both = self.all_gather(place), self.trainer.strategy.all_gather(place)
        self.found = [x.tolist() for x in both]

    @property
    def device_index(self) -> int:
        return getattr(self.trainer.strategy, "data_parallel_rank", self.global_rank)


def gather(rank: int, world: int, options: Any) -> Any:
    """Validate with `Gathers`; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    case = Case()
    model = Gathers(case, options is None, False)
    trainer = trainer_of(rank, world, case, options)
    trainer.validate(model, loaders(case)[1], verbose=False)
    return model.found, getattr(trainer.strategy, "data_parallel_size", world)


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2)])
def test_gathers_are_over_virtual_devices(dp, cp, pool):
    (expected, size), *_ = pool.run(gather, None, world=dp)
    assert size == dp
    for found in pool.run(gather, {"context_parallel_size": cp}, world=dp * cp):
        assert found == (expected, dp)
