"""`param_gather`: whole runs in every window equal those of the plain Trainer."""

import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_cp import ContextParallelStrategy
from lightning_cp.errors import ConfigError
from tests._harness.grid import named, rotated
from tests._harness.models import Case, LanguageModel, loaders, trainer_of
from tests._harness.pool import Pool
from tests._harness.rows import Row, check, trainer
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

CLIPPED = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)
LONG = Case(samples=8, epochs=2, trainer=CLIPPED)
ROWS = [
    Row("cp2", LONG, {}),
    Row("cp3", replace(LONG, recomputed="blocks"), {}, cp=3),
    Row("dp2-cp2", replace(LONG, samples=16), {}, 2, 2),
    Row("by-hand", replace(LONG, optimisation="manual", trainer=()), {}),
]
WINDOWS = [(stage, window) for window in ("early", "after_attention") for stage in (3, 1)]


@pytest.mark.parametrize(("row", "stage", "window"), rotated(ROWS, WINDOWS), ids=named)
def test_training(row, stage, window, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=stage, param_gather=window)


class Watched(LanguageModel):
    """Remembers the window of every batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.windows = [*getattr(self, "windows", []), self.trainer.strategy.gather_window]


def windows(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    case = Case(samples=10)
    pl.seed_everything(7, verbose=False)
    model = Watched(case)
    trainer_of(rank, world, case, {"zero_stage": 3, **options}).fit(model, *loaders(case))
    return model.windows


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["fsdp"] * 5),  # 24 tokens hide nothing
        ({"param_gather": "fsdp"}, ["fsdp"] * 5),
        # The first forward finds the order of the blocks.
        ({"param_gather": "early"}, ["fsdp", *["early"] * 4]),
        ({"param_gather": "after_attention"}, ["fsdp", *["after_attention"] * 4]),
        ({"param_gather": "early", "context_parallel_size": 1}, ["fsdp", *["early"] * 2]),
        ({"param_gather": "auto", "context_parallel_size": 1}, ["fsdp"] * 3),
    ],
)
def test_windows_of_a_run(options: dict[str, Any], expected: list[str], pool: Pool) -> None:
    assert pool.run(windows, options, world=2) == [expected] * 2


def chosen(rank: int, world: int, window: str) -> list[str]:
    from lightning_cp.plugin import windows as module

    seen = []

    def found(**sizes: Any) -> str:
        seen.append(sizes)
        return window

    real, module.gather_window = module.gather_window, found
    try:
        names = windows(rank, world, {})
    finally:
        module.gather_window = real
    (sizes,) = seen  # one decision
    assert sizes == {
        "tokens": 2 * 24,
        "pairs": 2 * 24 * 25 // 2,
        "width": 16,
        "parameters": sizes["parameters"],
        "itemsize": 4,
        "ranks": 2,
        "cp": 2,
    }
    assert sizes["parameters"] >= 4 * 16 * 16
    return names


@pytest.mark.parametrize("window", ["early", "after_attention"])
def test_auto_decides_after_the_first_backward(window: str, pool: Pool) -> None:
    assert pool.run(chosen, window, world=2) == [["fsdp", *[window] * 4]] * 2


def warned(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        windows(rank, world, options)
    return [str(x.message) for x in found if "param_gather" in str(x.message)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"param_gather": "after_attention", "context_parallel_size": 1}, "size is 1"),
        ({"param_gather": "early", "auto_wrap_policy": ()}, "0 blocks that are gathered apart"),
        ({"auto_wrap_policy": ()}, ""),
        ({"param_gather": "fsdp", "context_parallel_size": 1}, ""),
    ],
)
def test_a_window_that_does_nothing_says_so_once(
    options: dict[str, Any], reason: str, pool: Pool
) -> None:
    first, second = pool.run(warned, options, world=2)
    assert second == []
    assert len(first) == bool(reason)
    assert all(f"{reason}" in text and "torch's own order is kept" in text for text in first)


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="param_gather is about sharded parameters"):
        ContextParallelStrategy(param_gather="early")
    with pytest.raises(ConfigError, match="param_gather='late' is unknown; use one of auto, fsdp"):
        ContextParallelStrategy(param_gather="late", zero_stage=3)  # type: ignore[arg-type]
