"""Grids of cases of which the default run takes a part, and `pytest -m full` the rest."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def rotated(
    subjects: Iterable[Any], combinations: Iterable[Sequence[Any]], *, rare: Collection[Any] = ()
) -> list[Any]:
    """Every subject in every combination, for `pytest.mark.parametrize`.

    The default run takes one combination for each subject, in turn: all subjects, and all
    combinations if there are as many subjects. The others are marked `full`.

    Args:
        subjects: what is tested; the first value of a case.
        combinations: further values of a case.
        rare: subjects that the default run leaves out.

    Returns:
        Cases `(subject, *combination)`.
    """
    ways = list(combinations)
    return [
        pytest.param(subject, *way, marks=_full(turn != number % len(ways) or subject in rare))
        for number, subject in enumerate(subjects)
        for turn, way in enumerate(ways)
    ]


def rare(values: Iterable[Any], left_out: Collection[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which the default run leaves some out."""
    return [pytest.param(value, marks=_full(value in left_out)) for value in values]


def _full(wanted: bool) -> Any:
    return pytest.mark.full if wanted else ()


def named(value: object) -> str | None:
    """The id of a value that has a name; None leaves it to pytest."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else None
