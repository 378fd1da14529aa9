"""The table of docs/lightning-features.md: every row is run, and the page is that of the list."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import callbacks

from lightning_cp import ContextParallelStrategy
from lightning_cp.compat import can_reduce_unused
from lightning_cp.errors import ConfigError
from tests._harness.differences import differences
from tests._harness.feature import Feature
from tests._harness.features import FEATURES, GROUPS, PAGE, Raised, markdown, perform
from tests._harness.grid import rare
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

TOGETHER = 12
ELSEWHERE = {
    "test_parity": (
        "accumulate_grad_batches",
        "gradient_clip_val by norm",
        "gradient_clip_val by value",
        "Manual optimization",
        "precision 32-true",
        "precision 64-true",
        "precision bf16-mixed",
        "validate",
        "test",
        "zero_stage=0",
    ),
    "test_zero3": ("zero_stage=3", "zero_stage=3, save_checkpoint and ckpt_path"),
    "test_sharding_steps": ("toggle_optimizer with zero_stage=3",),
    "test_checkpoint": ("save_checkpoint and ckpt_path",),
    "test_compile": ("torch.compile of its network",),
    "test_predict": ("predict",),
    "test_logs": ("self.all_gather, sync_dist over virtual devices",),
    "test_loaders": (
        "overfit_batches",
        "limit_train_batches",
        "limit_train_batches, a fraction",
        "use_distributed_sampler=False",
        "IterableDataset",
        "IterableDataset, data='broadcast'",
    ),
    "test_shard_in": (
        "shard_in='worker'",
        "on_after_batch_transfer and its kin",
        "shard_in='worker' with an overridden transfer hook",
    ),
    "this one, as another profiler": ("profiler pytorch",),
}
"""Rows that another file of the default run shows as well: here they are marked `full`."""
NEWER = {
    "WeightAveraging (EMA)": "EMAWeightAveraging",
    "WeightAveraging with zero_stage=3": "EMAWeightAveraging",
}
Outcomes = Callable[[str, bool], list[Any]]


def cases() -> list[Any]:
    """Names of all rows, with their marks: the default run takes every second of the others."""
    shown = {name for names in ELSEWHERE.values() for name in names}
    assert shown <= FEATURES.keys()
    others = [name for name in FEATURES if name not in shown]
    return rare(FEATURES, shown | set(others[1::2]))


@pytest.fixture(scope="module")
def outcomes(request: Any, pool: Pool, tmp_path_factory: Any) -> Outcomes:
    """What the runs of a feature gave on every rank; several are run in one task."""
    found: dict[tuple[str, bool], list[Any]] = {}
    asked = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }

    def together(world: int, plain: bool) -> list[str]:
        return [
            name
            for name, feature in FEATURES.items()
            if (feature.plain if plain else feature.world) == world
            and name in asked
            and available(name)
        ]

    def run(name: str, plain: bool) -> list[Any]:
        if (name, plain) not in found:
            feature = FEATURES[name]
            world = feature.plain if plain else feature.world
            alike = together(world, plain)
            start = alike.index(name) // TOGETHER * TOGETHER
            names = alike[start : start + TOGETHER]
            folder: Path = tmp_path_factory.mktemp("features")
            results = pool.run(perform, names, plain, folder, world=world, timeout=100)
            for number, one in enumerate(names):
                found[one, plain] = [result[number] for result in results]
        return found[name, plain]

    return run


def available(name: str) -> bool:
    """Whether this Lightning, and this torch, have the feature."""
    if "zero_stage=3" in name and not can_reduce_unused():
        return False
    return name not in NEWER or hasattr(callbacks, NEWER[name])


def check(feature: Feature, outcomes: Outcomes) -> None:
    found = outcomes(feature.name, False)
    if feature.expectation == "refused":
        for rank, outcome in enumerate(found):
            assert isinstance(outcome, Raised), f"rank {rank} was not refused"
            assert re.search(feature.message, outcome.message), f"rank {rank}: {outcome.trace}"
        return
    for rank, outcome in enumerate(found):
        assert not isinstance(outcome, Raised), f"rank {rank}: {outcome.trace}"
    expected = outcomes(feature.name, True) if feature.plain else []
    for rank, outcome in enumerate(found if feature.plain else []):
        one = expected[rank * feature.plain // feature.world]
        assert not isinstance(one, Raised), f"plain: {one.trace}"
        if outcome is None:
            assert rank > 0
            continue
        far = [x for x in differences(outcome, one) if not x[1] <= feature.tolerance]
        assert not far, f"rank {rank}: {far[:5]}"


@pytest.mark.parametrize("name", cases())
def test_feature(name, outcomes):
    if not available(name):
        pytest.skip(f"not with this torch and this Lightning: {name}")
    check(FEATURES[name], outcomes)


def test_option_that_would_do_nothing_is_refused():
    with pytest.raises(ConfigError, match="find_unused_parameters=True is about zero_stage=0"):
        ContextParallelStrategy(zero_stage=3, find_unused_parameters=True)


def test_page_is_that_of_the_list():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m tests._harness.features"


def test_no_cell_is_empty_and_no_row_twice():
    rows = [feature for group in GROUPS.values() for feature in group]
    assert len(rows) == len(FEATURES) >= 45
    for row in rows:
        assert row.name.strip()
        assert row.how.strip()
        assert "|" not in row.name + row.how
        assert bool(row.message) == (row.expectation == "refused")
