"""Whole Trainer runs beside the plain Trainer: their rows, tolerances and references."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests._harness.models import Case, Outcome, fit
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
