"""Runs with the Trainer of `pytorch_lightning` equal those of the plain Trainer."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests._harness.both import other_fit
from tests._harness.models import Case, fit, furthest, seeded, trainer_of
from tests._harness.renamed import OTHER
from tests._harness.sharded import needs_sharding
from tests.dist.conftest import CORE
from tests.dist.test_checkpoint import fit_resuming

pytestmark = pytest.mark.dist

DOUBLE = "64-true"
ONE = Case(momentum=0.9)
TWO = Case(momentum=0.9, epochs=2)


@pytest.mark.parametrize(
    ("case", "options", "dp", "cp"),
    [
        (Case(precision=DOUBLE), "context_parallel", 1, 2),
        (Case(precision=DOUBLE, lengths=(24, 7)), {"layout": "contiguous"}, 1, 3),
        (
            Case(
                precision=DOUBLE,
                samples=12,
                trainer=(("accumulate_grad_batches", 2), ("gradient_clip_val", 0.1)),
            ),
            {"context_parallel_size": 2},
            2,
            2,
        ),
        (Case(precision=DOUBLE, optimisation="manual"), {"exchange": "allgather"}, 1, 2),
        pytest.param(Case(precision=DOUBLE), "context_parallel_zero3", 1, 2, marks=needs_sharding),
    ],
    ids=["name", "cp3", "dp2-cp2", "manual", "zero3"],
)
def test_fit_is_that_of_the_plain_trainer(case, options, dp, cp, pool):
    expected = pool.run(fit, case, world=dp)
    for rank, found in enumerate(pool.run(other_fit, case, options, world=dp * cp)):
        one = expected[rank // cp]
        assert found.swapped
        assert (found.ids, found.counts) == (one.ids, one.counts)
        assert found.metrics.keys() == one.metrics.keys()
        assert max(furthest(found, one).values()) <= 1e-12


def test_checkpoints_move_between_packages(pool, tmp_path):
    (whole,) = pool.run(fit, TWO, None, world=1)
    whole = whole._replace(ids=whole.ids[6:], step_losses=whole.step_losses[3:])
    pool.run(partial(other_fit, folder=tmp_path), ONE, {}, world=2)
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["epoch"] == 0
    resumed = pool.run(partial(other_fit, resume=last), TWO, {}, world=3)
    resumed += pool.run(fit_resuming, TWO, None, last, world=1)
    for found in resumed:
        assert found.ids == whole.ids
        assert max(furthest(found, whole).values()) <= 1e-6


def homes(rank: int, world: int) -> list[str]:
    """Where a run's classes come from; a task of the pool."""
    trainer = trainer_of(rank, world, Case(), {})
    module = type(seeded(Case())).__bases__[1]
    return [x.__module__ for x in (type(trainer), type(trainer.strategy), module, ModelCheckpoint)]


@pytest.mark.full
def test_the_core_runs_with_the_other_package(pools):
    """Ranks that find it under the names of `lightning.pytorch`; see tests/dist/conftest.py."""
    (found,) = pools(OTHER).run(homes, world=1)
    assert found == [
        "pytorch_lightning.trainer.trainer",
        "lightning_cp.plugin.pytorch_lightning",
        "pytorch_lightning.core.module",
        "pytorch_lightning.callbacks.model_checkpoint",
    ]


def test_files_of_the_core_are_there():
    assert all(Path(__file__).with_name(f"test_{name}.py").exists() for name in CORE)
