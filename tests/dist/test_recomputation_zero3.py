"""Whole runs with sharded parameters whose layers are recomputed, with and without dropout."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.fsdp import whole
from tests._harness.hf import in_double
from tests._harness.models import Case, trainer_of
from tests._harness.pool import Pool
from tests._harness.sharded import needs_sharding
from tests.dist.test_recomputation import CALLS, loss_of, made

pytestmark = [pytest.mark.dist, needs_sharding]

LENGTH, SAMPLES = 11, 4
P = 0.4
Options = Mapping[str, Any]
SHARDED: Options = {"zero_stage": 3}
TILE: Options = {"attention_dropout": "tile", "attention_backend": "reference"}


class Trained(pl.LightningModule):
    def __init__(self, kind: str, how: str, dropout: float) -> None:
        super().__init__()
        self.net = made(kind, how, dropout)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", loss_of(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Run(NamedTuple):
    """Losses of the steps, that of a validation before them, and the parameters after them."""

    losses: list[float]
    before: float
    parameters: dict[str, Tensor]


def rows() -> DataLoader[Any]:
    drawn = torch.randint(20, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row[:-1], "labels": row[1:]} for row in drawn]
    return DataLoader(data, batch_size=2)


def trained(
    rank: int, world: int, kind: str, how: str, dropout: float, options: Options | None
) -> Run:
    """Validate, and train for an epoch; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    model = Trained(kind, how, dropout)
    run = trainer_of(rank, world, Case(precision="64-true"), options)
    with in_double():
        (before,) = run.validate(model, rows(), verbose=False)
        run.fit(model, rows())
    parameters = {
        name: whole(p, keep=True).detach().clone() for name, p in model.named_parameters()
    }
    return Run(model.losses, before["val_loss"], parameters)


def assert_same(found: Run, expected: Run, bound: float) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=bound)
    assert found.before == pytest.approx(expected.before, abs=bound)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=0, atol=bound, msg=name)


SHORT = [("mha", "recomputed"), ("llama", "kept")]
KINDS = ("mha", "llama")


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=() if (kind, how) in SHORT else pytest.mark.full)
        for kind in KINDS
        for how in CALLS
        if how != "direct"
    ],
)
def test_recomputed_layers_train_as_on_one_device(kind: str, how: str, pool: Pool) -> None:
    (expected,) = pool.run(trained, kind, "direct", 0.0, None, world=1)
    for found in pool.run(trained, kind, how, 0.0, SHARDED, world=2):
        assert_same(found, expected, 1e-12)


@pytest.mark.parametrize("kind", [pytest.param("mha", marks=pytest.mark.full), "llama"])
def test_dropout_of_sharded_and_recomputed_layers(kind: str, pool: Pool) -> None:
    """Masks follow from the seed alone: whatever is in parts or computed again, runs are equal."""
    unused = {"find_unused_parameters": kind == "mha"}
    expected = pool.run(trained, kind, "direct", P, {**TILE, **unused}, world=3)[0]
    (plain,) = pool.run(trained, kind, "direct", 0.0, None, world=1)
    assert expected.before == pytest.approx(plain.before, abs=1e-12)
    assert expected.losses[0] != pytest.approx(plain.losses[0], abs=1e-4)
    for how in ("direct", "recomputed"):
        for found in pool.run(trained, kind, how, P, {**TILE, **SHARDED}, world=3):
            assert_same(found, expected, 1e-12)
    off = {**SHARDED, "attention_dropout": "off"}
    assert_same(pool.run(trained, kind, "direct", P, off, world=3)[0], plain, 1e-12)
