"""Verification of whole steps: real LightningModules, manual optimization, logs, odd batches."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_cp import ContextParallelStrategy, functional, verify
from lightning_cp.diagnostics.verify import Report
from lightning_cp.errors import BatchError, MismatchError, VerificationError
from tests._harness.faults import FAULTS, tokens
from tests._harness.group import one_group
from tests._harness.models import Case, LanguageModel, loaders, seeded
from tests._harness.parts import Transformer
from tests._harness.pool import Pool
from tests._harness.right import RIGHT
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist


class Step(pl.LightningModule):
    """A LightningModule around the small transformer, with everything a step may do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer, self.drop = Transformer().double(), nn.Dropout(0.3)
        self.head = nn.Linear(self.transformer.wte.embedding_dim, 256, dtype=torch.float64)
        self.metric = MeanMetric()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.drop(self.transformer(batch))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss, "metric": self.metric})
        return {"loss": loss, "note": "text"}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LocalLog(Step):
    """Logs a value of its own tokens."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        ids = batch["input_ids"].double()
        self.log("mean_token", ids[batch["labels"] != -100].mean())
        self.log("spread", ids.std())
        return self.loss(batch)


class Manual(Step):
    """Optimises by hand, twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()


class Detaching(nn.Module):
    """Right in the forward; its backward is lost on a shard."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == 24 else x.detach()


class LostGradient(Step):
    """A module whose gradient is lost on a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.detach = nn.Linear(1, 1, bias=False).double(), Detaching()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.transformer(batch)
        return F.cross_entropy(
            self.head(x + self.detach(self.scale(x[..., :1]))).flatten(0, 1),
            batch["labels"].flatten(),
        )


class WritesParameters(Step):
    """An average of the weights, inside the step."""

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        return self.loss(batch)


class Unlike(Step):
    """Other parameters on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.rand(1, generator=torch.Generator().manual_seed(RANK[0])))


class Breaks(Step):
    """Fails on rank 1 alone, between two exchanges."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if functional.positions(batch["input_ids"].shape[1])[0] > 0:
            raise KeyError("only here")
        return super().loss(batch)


RANK = [0]


def check(
    rank: int, world: int, make: Callable[[], nn.Module], batch: Any, options: dict[str, Any]
) -> Report:
    """Verify with the default group; a task of the pool."""
    RANK[0] = rank
    module = make()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    report = verify(module, batch, show=False, **options)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())
    return report


def test_a_lightning_step_is_equal_and_leaves_nothing(pool: Pool) -> None:
    for report in pool.run(check, Step, tokens(), {}, world=2):
        assert report.ok, report.finding
        assert set(report.compared.logs) == {"loss", "twice"}
        assert report.compared.loss[0] == pytest.approx(report.compared.loss[1], rel=1e-12)
        assert len(report.compared.gradients) == len(list(Step().parameters()))
        assert report.facts["dropout"].startswith("1 rates")


def test_the_report_is_the_same_on_every_rank(pool: Pool) -> None:
    first, *others = pool.run(check, LocalLog, tokens(), {}, world=3)
    assert all(other == first for other in others)


def test_a_logged_value_of_local_tokens_is_named(pool: Pool) -> None:
    for report in pool.run(check, LocalLog, tokens(), {}, world=2):
        assert not report.ok
        assert "logged value 'spread'" in report.finding.what
        assert report.compared.logs["mean_token"] < 1
        assert "functional.sequence_mean" in report.finding.remedy


def test_manual_optimization_compares_forward_and_losses(pool: Pool) -> None:
    for report in pool.run(check, Manual, tokens(), {}, world=2):
        assert report.ok, report.finding
        assert report.compared.attention == (4, 4)
        assert report.compared.loss[0] == pytest.approx(report.compared.loss[1], rel=1e-12)
        assert "manual" in report.facts["optimization"]


def test_a_lost_gradient_is_named(pool: Pool) -> None:
    for report in pool.run(check, LostGradient, tokens(), {}, world=2):
        assert report.finding.module == "scale"
        assert "'scale.weight'" in report.finding.what
        assert "adjoint" in report.finding.cause


def test_parameters_written_in_the_step_are_refused(pool: Pool) -> None:
    for failure in pool.failures(check, WritesParameters, tokens(), {}, world=2):
        assert failure.kind == "ContextParallelError"
        assert "head.weight" in failure.message


def test_parameters_that_differ_are_refused(pool: Pool) -> None:
    for failure in pool.failures(check, Unlike, tokens(), {}, world=2):
        assert failure.kind == MismatchError.__name__
        assert "'extra'" in failure.message


def test_a_batch_that_cannot_be_cut_is_refused(pool: Pool) -> None:
    for failure in pool.failures(check, Step, {"x": torch.ones(2)}, {}, world=2):
        assert failure.kind == BatchError.__name__


@pytest.mark.parametrize("padded", [False, True])
def test_long_rows_are_shortened(pool: Pool, padded: bool) -> None:
    batch, make = tokens(48), Step
    if padded:
        batch["attention_mask"] = (torch.arange(48) >= torch.tensor([[3], [40]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
        make = next(right.make for right in RIGHT if right.name == "encoder")
    for report in pool.run(check, make, batch, {"max_tokens": 13}, world=2):
        assert report.ok, report.finding
        assert report.facts["tokens per row"] == "13 of 48"


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_short_rows(pool: Pool, length: int) -> None:
    batch = tokens(length)
    batch["labels"] = batch["input_ids"].clone()
    for report in pool.run(check, Step, batch, {}, world=3):
        assert report.ok, report.finding


def test_a_step_of_ones_own(pool: Pool) -> None:
    for report in pool.run(own_step, world=2):
        assert report.ok, report.finding
        assert report.compared.loss == (None, None)
        assert report.compared.gradients == {}


def test_token_mean_is_what_is_compared(pool: Pool) -> None:
    own_mean = next(fault for fault in FAULTS if fault.name == "own-mean")
    for report in pool.run(averaged, own_mean.make, own_mean.batch(), world=3):
        assert report.ok, report.finding


def averaged(rank: int, world: int, make: Callable[[], nn.Module], batch: Any) -> Report:
    """Verify with `loss="token_mean"`; a task of the pool."""
    with one_group(rank, world, loss="token_mean") as parallel:
        return verify(make(), batch, parallel=parallel, show=False)


def own_step(rank: int, world: int) -> Report:
    """Tensors and no loss; a task of the pool."""
    module = Step()
    return verify(module, tokens(), step=lambda batch: module.transformer(batch), show=False)


def fit(rank: int, world: int, case: Case, faulty: bool) -> list[float]:
    """Train with the first batch verified; a task of the pool."""
    model: LanguageModel = seeded(case)
    if faulty:
        model.net.case = Case(positions="arange")
    strategy = ContextParallelStrategy(verify="first_batch", sequence_dims={"0": 1, "1": 1})
    trainer = pool_trainer(rank, world, strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, loaders(case)[0])
    return model.logged


def test_first_batch_is_verified_and_training_goes_on_as_if_not(
    pool: Pool,
) -> None:
    case = Case(positions="functional", kind="tuple")
    assert pool.run(fit, case, False, world=2) == pool.run(fit_unverified, case, world=2)


def fit_unverified(rank: int, world: int, case: Case) -> list[float]:
    """The same without verification; a task of the pool."""
    model = seeded(case)
    strategy = ContextParallelStrategy(sequence_dims={"0": 1, "1": 1})
    trainer = pool_trainer(rank, world, strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, loaders(case)[0])
    return model.logged


def test_first_batch_stops_a_faulty_model(pool: Pool) -> None:
    case = Case(positions="functional", kind="tuple")
    for failure in pool.failures(fit, case, True, world=2):
        assert failure.kind == VerificationError.__name__
        assert "module 'net' (GPT, models.py:" in failure.message
        assert "functional.positions" in failure.message
