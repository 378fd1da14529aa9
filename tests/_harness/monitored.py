"""Trainer runs with a monitor, whose rows are read back from the logger's file."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cp.plan import build_plan
from lightning_cp.plugin import pytorch_lightning as other
from lightning_cp.plugin import strategy as usual
from tests._harness.both import OtherLanguageModel
from tests._harness.models import Case, LanguageModel, Text, loaders
from tests._harness.trainer import pool_trainer, workers_allowed

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to be monitored.

    Attributes:
        case: what is trained.
        documents: lengths of the documents of every sample; the samples of the case where empty.
        workers: of the loader.
        is_causal: what attention is.
        package: whose Trainer it is.
        validation: log validations.
        validate: run one after every epoch.
    """

    case: Case
    documents: tuple[tuple[int, ...], ...] = ()
    workers: int = 0
    is_causal: bool = True
    package: str = "lightning.pytorch"
    validation: bool = False
    validate: bool = False


class Packed(Dataset[Any]):
    """One row of documents per sample."""

    def __init__(self, run: Run) -> None:
        self._documents = run.documents
        longest = max(map(sum, run.documents))
        self._text = Text(Case(lengths=(longest,), valid="front"), len(run.documents))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens, labels and positions."""
        lengths = self._documents[index]
        sample = {name: x[: sum(lengths)] if x.ndim else x for name, x in self._text[index].items()}
        return {**sample, "position_ids": torch.cat([torch.arange(n) for n in lengths])}


class Bidirectional(LanguageModel):
    """Every token sees every other of its document."""

    def loss(self, batch: Any) -> Tensor:
        """The loss without causality."""
        causal = F.scaled_dot_product_attention

        def full(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
            return causal(q, k, v, **options)

        with patch.object(F, "scaled_dot_product_attention", full):
            return super().loss(batch)


class Seen(NamedTuple):
    """What a run left on one rank: the logger's rows, and the parameters."""

    rows: list[Figures]
    parameters: list[Tensor]

    def of(self, name: str, prefix: str = "cp/") -> list[float]:
        """The values of a figure, row by row."""
        return [row[prefix + name] for row in self.rows if prefix + name in row]


def data(run: Run) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training and for validation."""
    if not run.documents:
        return loaders(run.case)
    context = "fork" if run.workers else None
    train: DataLoader[Any] = DataLoader(
        Packed(run), batch_size=1, num_workers=run.workers, multiprocessing_context=context
    )
    return train, train


def monitored(rank: int, world: int, run: Run, options: Mapping[str, Any], folder: Path) -> Seen:
    """Train, and read what was logged; a task of the pool. Every look at the clock is a second.

    Args:
        rank: rank of this process.
        world: number of ranks.
        run: what to run.
        options: of the strategy.
        folder: empty, where the first rank writes.
    """
    alien = run.package == "pytorch_lightning"
    classes = other if alien else usual
    package = __import__(run.package, fromlist=["loggers"])
    model: Any = OtherLanguageModel if alien else LanguageModel if run.is_causal else Bidirectional
    package.seed_everything(7, verbose=False)
    module, case = model(run.case), run.case
    made = pool_trainer(
        rank,
        world,
        classes.ContextParallelStrategy(**options),
        package=run.package,
        callbacks=[classes.ContextParallelMonitor(validation=run.validation)],
        logger=package.loggers.CSVLogger(folder, name="", version=""),
        max_epochs=case.epochs,
        precision=case.precision,
        num_sanity_val_steps=0,
        **{"log_every_n_steps": 1, **dict(case.trainer)},
    )
    train, validation = data(run)
    build_plan.cache_clear()
    ticks = (float(second) for second in count())
    with patch("lightning_cp.plugin.monitor.perf_counter", lambda: next(ticks)), workers_allowed():
        made.fit(module, train, validation if run.validate else None)
    path = folder / "metrics.csv"
    rows = read(path) if rank == 0 else []
    return Seen(rows, [p.detach().clone() for p in module.parameters()])


def read(path: Path) -> list[Figures]:
    """The rows of a logger's file, without their empty cells."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {name: float(cell) for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]
