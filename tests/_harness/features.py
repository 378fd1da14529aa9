"""The features of a Trainer, each with a run that shows what becomes of it.

`python -m tests._harness.features` writes the table of docs/lightning-features.md.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests._harness.feature import Feature
from tests._harness.feature_callbacks import CALLBACKS, LOGGING
from tests._harness.feature_running import MODULES, RUNNING
from tests._harness.feature_runs import Place
from tests._harness.feature_training import DURATION, PRECISION, TRAINING

PAGE = Path(__file__).parents[2] / "docs" / "lightning-features.md"

GROUPS: dict[str, list[Feature]] = {
    "Length of a run": DURATION,
    "Optimization and options": TRAINING,
    "Precision": PRECISION,
    "Callbacks": CALLBACKS,
    "Logging and profiling": LOGGING,
    "Modules and data": MODULES,
    "Stages, checkpoints, launch": RUNNING,
}
FEATURES = {feature.name: feature for group in GROUPS.values() for feature in group}


class Raised(NamedTuple):
    """An error of a run."""

    kind: str
    message: str
    trace: str


def perform(rank: int, world: int, names: Sequence[str], plain: bool, folder: Path) -> list[Any]:
    """Run features one after the other; a task of the pool.

    Args:
        rank: rank of this process.
        world: number of ranks.
        names: of features.
        plain: whether with the plain Trainer.
        folder: an empty one, the same on every rank.

    Returns:
        What each run returned, or `Raised`.
    """
    outcomes = []
    for number, name in enumerate(names):
        feature = FEATURES[name]
        place = Place(rank, world, None if plain else feature.options, folder / str(number))
        place.folder.mkdir(parents=True, exist_ok=True)
        try:
            outcomes.append(feature.check(place))
        except Exception as error:
            outcomes.append(Raised(type(error).__name__, str(error), traceback.format_exc()))
            torch.set_default_dtype(torch.float32)
    return outcomes


def markdown() -> str:
    """The page, without its introduction."""
    lines = []
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", "", "| feature | status | note |", "|---|---|---|"]
        lines += [f"| {x.name} | {x.expectation} | {x.how} |" for x in group]
    return "\n".join([INTRODUCTION, *lines]) + "\n"


INTRODUCTION = """\
# Lightning features

Every row is run by `tests/dist/test_features.py`, which also holds this page to its list.

- **works**: a run on two ranks that share each sequence, on CPU, gives what the plain Trainer gives
  on one device: parameters, losses of steps, logged metrics, order of samples, numbers of steps,
  batches and validations, and what the note names. Numbers are in float64 and equal to 1e-10 unless
  the note says otherwise.
- **refused**: the run stops on every rank, or no Trainer can be made, with a message that says why.

Rows that name another file are about who starts the processes: that file runs them. Nothing here
was run on a GPU, and nodes are processes of one machine."""


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
