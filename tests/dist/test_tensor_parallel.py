"""Layers that ranks share, with sequences that others share: equal to the plain Trainer."""

from dataclasses import replace
from typing import Any

import pytest

from tests._harness.grid import rotated
from tests._harness.models import Case, fit
from tests._harness.rows import assert_same, trainer
from tests._harness.shared import (
    Distributed,
    Shareable,
    SharedByUser,
    ShardedByUser,
    plan,
    share,
)
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

CLIPPED = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)
FIVE = Case(samples=20, precision="64-true", momentum=0.9, kv_heads=2, trainer=CLIPPED)
TWICE = replace(FIVE, samples=40)
TP2 = {"tensor_parallel_size": 2, "context_parallel_size": 2}

WAYS: dict[str, tuple[type[Shareable], dict[str, Any]]] = {
    "plan": (Shareable, {"tensor_parallel_plan": plan()}),
    "function": (Shareable, {"tensor_parallel_plan": share}),
    "configure_model": (SharedByUser, {}),
    "distributed-heads": (Distributed, {}),
}


@pytest.mark.parametrize(("way", "stage"), rotated(WAYS, [(3,), (2,), (1,)]))
def test_five_steps(way, stage, pool):
    kind, options = WAYS[way]
    check(kind, FIVE, {**TP2, **options, "zero_stage": stage}, pool, world=4)


def test_module_for_the_strategy_of_lightning(pool):
    """Nothing but the strategy changes: layers and parameters are cut in configure_model."""
    check(ShardedByUser, FIVE, TP2, pool, world=4)


def test_ranks_that_share_layers_only(pool):
    options = {**TP2, "context_parallel_size": 1, "zero_stage": 3, "tensor_parallel_plan": plan()}
    check(Shareable, FIVE, options, pool, world=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "replicas", "stage"), [(2, 1, 3), (2, 1, 1), (2, 2, 3), (2, 2, 1), (1, 2, 3), (1, 2, 2)]
)
def test_eight_ranks(tp, replicas, stage, pool):
    """With dp2 x cp2 x tp2, that as two replicas, and two replicas of dp2 x cp2."""
    options = {**TP2, "tensor_parallel_size": tp, "data_parallel_replicate_size": replicas}
    options |= {"zero_stage": stage}
    if tp == 2:
        options["tensor_parallel_plan"] = plan()
    dp = 4 // tp
    check(Shareable, replace(FIVE, samples=20 * dp), options, pool, world=8, dp=dp)


def check(
    kind: type[Shareable],
    case: Case,
    options: dict[str, Any],
    pool: Any,
    *,
    world: int,
    dp: int = 1,
) -> None:
    expected = pool.run(fit, case, None, kind, world=dp)
    for rank, found in enumerate(pool.run(fit, case, options, kind, world=world, timeout=100)):
        one = expected[rank * dp // world]
        assert_same(found, one, 1e-11, where=f"rank {rank}")
