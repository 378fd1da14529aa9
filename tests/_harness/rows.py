"""Whole Trainer runs beside the plain Trainer: their rows, tolerances and references."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tests._harness.models import Case, Outcome, fit, furthest
from tests._harness.pool import Pool

TOLERANCE = {"32-true": 1e-6, "64-true": 1e-12}
Plain = Callable[..., list[Outcome]]


class Row(NamedTuple):
    """A run: its name, the options of the strategy, the number of virtual devices and of ranks."""

    name: str
    case: Case
    options: dict[str, Any]
    dp: int = 1
    cp: int = 2


def trainer(**options: Any) -> tuple[tuple[str, Any], ...]:
    """Options of the Trainer, as a case has them."""
    return tuple(options.items())


TRAINING = [
    Row("accumulation-rest", Case(samples=10, trainer=trainer(accumulate_grad_batches=2)), {}),
    Row(
        "clip-value",
        Case(trainer=trainer(gradient_clip_val=1e-3, gradient_clip_algorithm="value")),
        {},
    ),
    Row("manual", Case(optimisation="manual"), {}),
    Row("recomputed-blocks", Case(recomputed="blocks"), {}, cp=3),
    Row("recomputed-but-attention", Case(recomputed="kept"), {}, cp=3),
    Row("recomputed-loss", Case(recomputed="everything"), {}),
    Row(
        "one-backward-for-two-batches",
        Case(lengths=(24, 17), recomputed="blocks", optimisation="delayed"),
        {},
    ),
]
"""Ways to train that every stage of sharding has in its default run."""
TOGETHER = [
    Row("recomputed-loss-by-hand", Case(recomputed="everything", optimisation="manual"), {}),
    Row(
        "everything-on-four-ranks",
        Case(
            samples=24,
            epochs=2,
            momentum=0.9,
            recomputed="blocks",
            kv_heads=2,
            trainer=trainer(accumulate_grad_batches=2, gradient_clip_val=0.1),
        ),
        {},
        2,
        2,
    ),
]
"""Several of them at once."""


def plain_runs(pool: Pool) -> Plain:
    """Runs the plain Trainer on `dp` devices, once for each case.

    Returns:
        A function of a case and `dp`, 1 unless given; its value has an outcome for every device.
    """
    found: dict[Any, list[Outcome]] = {}

    def run(case: Case, dp: int = 1) -> list[Outcome]:
        if (case, dp) not in found:
            found[case, dp] = pool.run(fit, case, world=dp)
        return found[case, dp]

    return run


def assert_same(found: Outcome, expected: Outcome, tolerance: float, *, where: str = "") -> None:
    """The same rows in the same number of steps, and equal parameters and losses.

    Args:
        found: what a rank found.
        expected: what the plain Trainer found.
        tolerance: largest difference, see `furthest`.
        where: beginning of messages.
    """
    for name in ("ids", "counts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one == other, f"{where}: {name} {one}, expected {other}"
    assert found.metrics.keys() == expected.metrics.keys(), f"{where}: {found.metrics}"
    distances = furthest(found, expected)
    print(f"{where}: {distances}")
    assert max(distances.values()) <= tolerance, f"{where}: {distances}"


def check(row: Row, pool: Pool, plain: Plain, precision: str, **options: Any) -> None:
    """Every rank of a row finds what the plain Trainer finds on its virtual device.

    Args:
        row: what is run.
        pool: the ranks.
        plain: see `plain_runs`.
        precision: a key of `TOLERANCE`.
        options: of the strategy, below those of the row.
    """
    case = replace(row.case, precision=precision)
    expected = plain(case, row.dp)
    options = {"context_parallel_size": row.cp, **options, **row.options}
    for rank, found in enumerate(pool.run(fit, case, options, world=row.dp * row.cp)):
        where = f"{row.name} {precision} rank {rank}"
        assert_same(found, expected[rank // row.cp], TOLERANCE[precision], where=where)
        assert found.swapped == (row.cp > 1), where
