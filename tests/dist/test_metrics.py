"""Metrics of torchmetrics have the plain Trainer's values, fed with local tokens or with rows."""

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.text import Perplexity

from lightning_cp.errors import MismatchError
from lightning_cp.metrics import METHODS, fingerprint
from tests._harness.models import IGNORED, VOCABULARY, Case, LanguageModel, loaders, trainer_of

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.*sync_dist=True"),
]

OPTIONS = {"layout": "contiguous"}


def classes(kind: Any, average: str) -> Metric:
    found: Metric = kind(VOCABULARY, average=average, ignore_index=IGNORED)
    return found


def of_tokens() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict(
        {
            "accuracy": classes(MulticlassAccuracy, "micro"),
            "perplexity": Perplexity(ignore_index=IGNORED),
            "mean": MeanMetric(),
            "sum": SumMetric(),
            "max": MaxMetric(),
        }
    )


class Measured(LanguageModel):
    """Feeds metrics with local tokens and with values of the whole sequence."""

    def __init__(self, case: Case, dense: bool) -> None:
        super().__init__(case, dense)
        stages = ("fit", "val")
        self.tokens = torch.nn.ModuleDict({stage: of_tokens() for stage in stages})
        self.rows = torch.nn.ModuleDict(
            {x: torch.nn.ModuleDict({"sum": SumMetric(), "mean": MeanMetric()}) for x in stages}
        )
        self.ids_seen = CatMetric()
        self.together = MetricCollection(
            [classes(MulticlassAccuracy, "macro"), classes(MulticlassRecall, "macro")]
        )
        self.steps: list[list[float]] = []

    def feed(self, batch: Any, stage: str) -> Tensor:
        per_token, per_row = self.tokens[stage], self.rows[stage]
        tokens, labels, ids, *rest = self.fields(batch)
        logits = self.net(tokens, *rest)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        with torch.no_grad():
            valid = labels != IGNORED
            guessed = logits.argmax(-1) % 7 + labels.clamp(min=0) // 2
            right = guessed.flatten(), labels.flatten()
            of_step = [per_token["accuracy"](*right)]
            per_token["perplexity"](logits, labels)
            per_token["mean"].update(logits.amax(-1), valid.to(logits.dtype))
            of_step.append(per_token["sum"](valid.to(logits.dtype)))
            per_token["max"].update(logits)
            of_step.append(per_row["sum"](loss))
            per_row["mean"].update(loss, len(ids))
            if stage == "val":
                self.ids_seen.update(ids)
                self.together.update(*right)
        self.steps.append([float(x) for x in of_step])
        return loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.feed(batch, "fit")
        for name, metric in self.tokens["fit"].items():
            self.log(f"train_{name}", metric, on_step=True, on_epoch=True)
        self.log("train_rows", self.rows["fit"]["sum"])
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.feed(batch, "val")
        self.log_dict(dict(self.tokens["val"].items()))
        self.log_dict({f"rows_{name}": metric for name, metric in self.rows["val"].items()})
        self.log_dict(self.together)

    def on_validation_epoch_end(self) -> None:
        self.log("ids", self.ids_seen.compute().float().square().sum())
        self.ids_seen.reset()

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def run(rank: int, world: int, case: Case, options: Any) -> Any:
    """Train and validate; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    model = Measured(case, options is None)
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(model, *loaders(case))
    left = [x for m in model.modules() if isinstance(m, Metric) for x in METHODS if x in vars(m)]
    assert set(left) <= {"update"}
    return model.steps, {name: float(x) for name, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("dp", "cp"), [pytest.param(1, 2, marks=pytest.mark.full), (1, 3), (2, 2)])
def test_values_are_those_of_the_plain_trainer(dp, cp, pool):
    case = Case(samples=12, lengths=(23,), epochs=2, batch=2)
    expected = pool.run(run, case, None, world=dp)
    found = pool.run(run, case, {**OPTIONS, "context_parallel_size": cp}, world=dp * cp)
    for rank, (steps, ends) in enumerate(found):
        one_steps, one_ends = expected[rank // cp]
        assert len(one_ends) > 12
        for step, one in zip(steps, one_steps, strict=True):
            assert step == pytest.approx(one, rel=1e-5, nan_ok=True)
        assert ends == pytest.approx(one_ends, rel=1e-5, nan_ok=True)


class Alone(LanguageModel):
    """Feeds one metric as a test says."""

    def __init__(self, case: Case, how: str, rank: int) -> None:
        super().__init__(case)
        self.how, self.rank, self.results = how, rank, []
        group = torch.distributed.group.WORLD if how == "group" else None
        self.metric: Metric = SumMetric(process_group=group)

    def validation_step(self, batch: Any, index: int) -> None:
        tokens, _, _, *rest = self.fields(batch)
        self.net(tokens, *rest)
        own = float(self.rank + 1)
        if self.how == "mixed":
            self.metric.update(own if index else 1.0)
        elif self.how == "times" and self.rank == 1:
            return
        elif self.how == "close":
            self.metric.update(torch.tensor(1.0 + self.rank * 1e-8, dtype=torch.float64))
        else:
            self.metric.update(own if self.how == "copy" else 1.0)

    def on_validation_epoch_end(self) -> None:
        if self.how == "copy":
            copied = deepcopy(self.metric)
            copied.reset()
            copied.update(float(self.rank))
            self.results.append(float(copied.compute()))
            alike = deepcopy(self.metric)
            alike.reset()
            self.results.append(float(alike(5.0)))
            self.results.append(float(alike.compute()))
        self.results.append(float(self.metric.compute()))


def validate(rank: int, world: int, how: str) -> list[float]:
    """Validate two batches; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    case = Case()
    model = Alone(case, how, rank)
    trainer_of(rank, world, case, OPTIONS).validate(model, loaders(case)[1], verbose=False)
    return model.results


@pytest.mark.parametrize(
    ("how", "expected"), [("equal", [2.0]), ("close", [2.0]), ("group", [4.0])]
)
def test_values_of_the_whole_sequence_count_once(how, expected, pool):
    for found in pool.run(validate, how, world=2):
        assert found == pytest.approx(expected, rel=1e-7)


def test_copies_count_as_their_originals_do(pool):
    for found in pool.run(validate, "copy", world=2):
        assert found == [1.0, 5.0, 5.0, 6.0]


def test_mixed_updates_stop_every_rank(pool):
    for failure in pool.failures(validate, "mixed", world=2):
        assert failure.kind == MismatchError.__name__
        assert "metric 'metric' (SumMetric)" in failure.message
        assert "in 1 updates and differ in 1" in failure.message


def test_a_rank_that_does_not_update_stops_every_rank(pool):
    for failure in pool.failures(validate, "times", world=2):
        assert failure.kind == MismatchError.__name__
        assert "updated [2, 0] times" in failure.message


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((torch.ones(2, 3),), (torch.ones(2, 3),), True),
        ((torch.ones(2, 3),), (torch.ones(3, 2),), False),
        ((torch.tensor([1, 2]),), (torch.tensor([2, 1]),), False),
        ((torch.tensor([1.0, 2.0]),), (torch.tensor([2.0, 1.0]),), False),
        ((1.0,), (2.0,), False),
        (("a", 1), ("a", 1), True),
        (("a", 1), ("a", 2), False),
        ((torch.tensor([True, False]),), (torch.tensor([False, True]),), False),
        ((torch.empty(0),), (torch.empty(0),), True),
    ],
)
def test_fingerprint(one, other, same):
    assert torch.equal(fingerprint(one, {}), fingerprint(other, {})) == same
    assert torch.equal(fingerprint((), {"x": one}), fingerprint((), {"x": other})) == same
