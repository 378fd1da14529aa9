"""Sharded parameters: what a verification in front of the run sees and leaves as it was."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_cp import verify
from tests._harness.models import LanguageModel, fit, furthest, loaders, trainer_of
from tests._harness.sharded import DOUBLE, MANUAL, SHARDED

pytestmark = pytest.mark.dist

VERIFIED = {**SHARDED, "verify": "first_batch"}


class Numbered(LanguageModel):
    """Makes positions of its own, from the number of local tokens."""

    def fields(self, batch: Any) -> tuple[Any, ...]:
        tokens, labels, ids, positions, *rest = super().fields(batch)
        if positions is not None:
            positions = positions * 0 + torch.tensor(range(tokens.shape[1]))
        return tokens, labels, ids, positions, *rest


@pytest.mark.parametrize(
    ("kind", "case", "dp"),
    [
        pytest.param(LanguageModel, DOUBLE, 1, marks=pytest.mark.full),
        (LanguageModel, replace(DOUBLE, samples=12), 2),
        (LanguageModel, MANUAL, 1),
    ],
)
def test_verified_run_is_the_same(kind, case, dp, pool, plain):
    expected = plain(case, dp)
    options = {**VERIFIED, "context_parallel_size": 2}
    for rank, found in enumerate(pool.run(fit, case, options, kind, world=2 * dp)):
        distances = furthest(found, expected[rank // 2])
        assert max(distances.values()) <= 1e-12, distances


def test_verification_finds_the_module(pool):
    for failure in pool.failures(fit, DOUBLE, VERIFIED, Numbered, world=2):
        assert failure.kind == "VerificationError", failure.trace
        assert "net" in failure.message


def gradients_of(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    """Errors of every gradient, as a verification compares them."""
    found: dict[str, float] = {}

    class Verified(LanguageModel):
        def on_train_start(self) -> None:
            super().on_train_start()
            strategy: Any = self.trainer.strategy
            batch = next(iter(loaders(self.case)[0]))
            report = verify(self, batch, parallel=strategy._parallel, show=False)
            report.raise_if_wrong()
            found.update(report.compared.gradients)

    pl.seed_everything(7, verbose=False)
    trainer_of(rank, world, DOUBLE, options).fit(Verified(DOUBLE), *loaders(DOUBLE))
    return found


def test_verification_compares_whole_gradients(pool):
    (expected, _), (found, other) = (
        pool.run(gradients_of, options, world=2) for options in ({}, SHARDED)
    )
    assert found.keys() == expected.keys()
    assert found == other
    assert len(found) > 20
