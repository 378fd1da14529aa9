"""Whole runs of a Trainer with one of its features, which say what is to be compared."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.fsdp import whole
from tests._harness import feature_modules as modules
from tests._harness.models import Case, Steps, Text, loaders, trainer_of

BASE = Case(samples=12, epochs=2, precision="64-true", momentum=0.9)
"""Six batches of two rows in each of two epochs."""
SMALL = replace(BASE, samples=8, epochs=1)


class Place(NamedTuple):
    """Where a run takes place.

    Attributes:
        rank: rank of this process.
        world: number of ranks.
        options: of the context-parallel strategy; None: the plain Trainer.
        folder: empty at the start, shared by the ranks of one run.
    """

    rank: int
    world: int
    options: Mapping[str, Any] | None
    folder: Path


Run = Callable[[Place], Any]


class Count(Callback):
    """Counts hooks, and notes when there was a validation."""

    def __init__(self) -> None:
        self.hooks: Counter[str] = Counter()
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Count."""
        self.hooks["train"] += 1

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Count."""
        self.hooks["validate"] += 1

    def on_test_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Count."""
        self.hooks["test"] += 1

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Count."""
        self.hooks["epochs"] += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Note the batches that were trained on before."""
        self.validated.append(-1 if trainer.sanity_checking else self.hooks["train"])


def made(place: Place, kind: type[Steps] = modules.Model, case: Case = BASE) -> Any:
    """A module with its initial parameters, the same for every run."""
    pl.seed_everything(7, verbose=False)
    return kind(case, place.options is None)


def runner(place: Place, case: Case, **options: Any) -> pl.Trainer:
    """The Trainer of a run."""
    settings: dict[str, Any] = {"default_root_dir": place.folder, **options}
    return trainer_of(place.rank, place.world, case, place.options, **settings)


def parameters(model: nn.Module) -> dict[str, Any]:
    """Whole parameters."""
    return {
        re.sub(r"_orig_mod\.", "", name): whole(p, keep=True).detach().float().numpy().copy()
        if p.dtype == torch.bfloat16
        else whole(p, keep=True).detach().numpy().copy()
        for name, p in model.named_parameters()
    }


def found(trainer: pl.Trainer, model: Any) -> dict[str, Any]:
    """What is left of a run."""
    count = next((x for x in trainer.callbacks if isinstance(x, Count)), Count())  # type: ignore[attr-defined]
    return {
        "parameters": parameters(model),
        "losses": model.logged,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "ids": model.ids,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "hooks": dict(count.hooks),
        "validated": count.validated,
        "seen": getattr(model, "seen", []),
    }


def fitted(
    kind: type[Steps] = modules.Model,
    *,
    case: Case = BASE,
    callbacks: Callable[[Place], list[Any]] | None = None,
    more: Callable[[Place, pl.Trainer], Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    options: Callable[[Place], dict[str, Any]] | None = None,
    **trainer: Any,
) -> Run:
    """A run of `fit`.

    Args:
        kind: class of the module.
        case: everything about the run.
        callbacks: makes those of the Trainer.
        more: what else to compare, asked after the run.
        prepare: changes the module before it.
        options: of the Trainer, where they depend on the place.
        trainer: other options of the Trainer.
    """

    def run(place: Place) -> Any:
        model = made(place, kind, case)
        if prepare is not None:
            prepare(model)
        own = callbacks(place) if callbacks is not None else []
        settings = {**trainer, **(options(place) if options is not None else {})}
        runs = runner(place, case, callbacks=[Count(), *own], **settings)
        runs.fit(model, *loaders(case))
        outcome = found(runs, model)
        if more is not None:
            outcome["more"] = more(place, runs)
        return outcome

    return run


def evaluated(
    stage: str, *, kind: type[Steps] = modules.Model, case: Case = BASE, **trainer: Any
) -> Run:
    """A run of `validate`, `test` or `predict`; whole predictions are on the first rank."""

    def run(place: Place) -> Any:
        model = made(place, kind, case)
        runs = runner(place, case, callbacks=[Count()], **trainer)
        outcome = getattr(runs, stage)(model, loaders(case)[0])
        predictions = stage == "predict"
        if predictions and place.options is not None and place.rank % 2:
            assert outcome == [None] * len(outcome)
            return None
        batches = [{k: v.numpy() for k, v in x.items()} for x in outcome] if predictions else []
        return {**found(runs, model), "predictions": batches}

    return run


def table(place: Place, trainer: pl.Trainer) -> Any:
    """Rows of the CSV files of a run, without the clock."""
    trainer.strategy.barrier()
    rows = []
    for file in sorted(place.folder.rglob("metrics.csv")):
        with file.open() as lines:
            rows += [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    return rows


def failing(kind: type[Steps], **trainer: Any) -> Run:
    """A run that a step ends; the file that it leaves."""

    def run(place: Place) -> Any:
        from lightning.pytorch.callbacks import OnExceptionCheckpoint

        callback = OnExceptionCheckpoint(place.folder, filename="failed")
        runs = runner(place, BASE, callbacks=[callback], **trainer)
        model = made(place, kind)
        try:
            runs.fit(model, *loaders(BASE))
        except ArithmeticError as error:
            text = str(error)
        file = torch.load(place.folder / "failed.ckpt", weights_only=False)
        state = {name: value.numpy() for name, value in file["state_dict"].items()}
        return {"text": text, "step": file["global_step"], "state": state}

    return run


def resumed(**second: Any) -> Run:
    """An epoch, a checkpoint that all ranks save, and a second epoch from it."""

    def run(place: Place) -> Any:
        first = runner(place, BASE, max_epochs=1)
        first.fit(made(place), *loaders(BASE))
        file = place.folder / "saved.ckpt"
        first.save_checkpoint(file)
        model = made(place)
        runs = runner(place, BASE, max_epochs=2, **second)
        runs.fit(model, *loaders(BASE), ckpt_path=file)
        keys = sorted(torch.load(file, weights_only=True))
        return {**found(runs, model), "keys": keys}

    return run


def twice(place: Place) -> Any:
    """Fit, validate, test, predict and fit again with one Trainer and one module."""
    model, runs = made(place), runner(place, BASE, max_epochs=1)
    train, validation = loaders(BASE)
    runs.fit(model, train, validation)
    scores = [runs.validate(model, validation, verbose=False), runs.test(model, train)]
    runs.predict(model, validation)
    runs.fit_loop.max_epochs = 2
    runs.fit(model, train, validation)
    return {**found(runs, model), "scores": scores}


def reloading(place: Place) -> Any:
    """A run with the module's own loaders."""
    model = made(place, modules.Reloading)
    runs = runner(place, BASE, callbacks=[Count()], reload_dataloaders_every_n_epochs=1)
    runs.fit(model)
    return found(runs, model)


class Module(pl.LightningDataModule):
    """The usual loaders, and two for validation."""

    def setup(self, stage: str) -> None:
        """Make the data."""
        self.data = loaders(BASE)

    def train_dataloader(self) -> Any:
        """Training data."""
        return self.data[0]

    def val_dataloader(self) -> Any:
        """Two loaders."""
        return [self.data[1], self.data[0]]


def with_datamodule(place: Place) -> Any:
    """A run with a LightningDataModule."""
    model, runs = made(place, modules.Several), runner(place, BASE)
    runs.fit(model, datamodule=Module())
    return found(runs, model)


class Endless(IterableDataset[Any]):
    """The samples as a stream, the same in every process."""

    def __iter__(self) -> Any:
        data = Text(BASE, BASE.samples)
        return (data[index] for index in range(len(data)))


def streamed(place: Place) -> Any:
    """A run on an iterable dataset."""
    model, runs = made(place), runner(place, BASE, max_epochs=1)
    runs.fit(model, DataLoader(Endless(), batch_size=2))
    return found(runs, model)


class Writer(BasePredictionWriter):
    """Writes a file for every rank that has predictions."""

    def __init__(self, place: Place) -> None:
        super().__init__("epoch")
        self.place = place

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        """Write."""
        torch.save(predictions, self.place.folder / f"{trainer.global_rank}.pt")


def written(place: Place) -> Any:
    """Files of a prediction writer."""
    runs = runner(place, BASE, callbacks=[Writer(place)])
    runs.predict(made(place), loaders(BASE)[1])
    runs.strategy.barrier()
    files = sorted(place.folder.glob("*.pt"))
    return [[{k: v.numpy() for k, v in x.items()} for x in torch.load(f)] for f in files]


def rates(place: Place) -> Any:
    """Suggestion and curve of the learning-rate finder."""
    from lightning.pytorch.tuner import Tuner

    class Rated(modules.Model):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model, runs = made(place, Rated), runner(place, replace(BASE, epochs=10))
    train = loaders(BASE)[0]
    finder: Any = Tuner(runs).lr_find(model, train, num_training=20, early_stop_threshold=None)
    return {**finder.results, "suggestion": finder.suggestion(), "parameters": parameters(model)}


def finding_batch_size(place: Place) -> None:
    """The callback that looks for a batch size when a fit begins."""
    from lightning.pytorch.callbacks import BatchSizeFinder

    class Loading(modules.Model):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return loaders(replace(BASE, batch=self.batch_size))[0]

    runner(place, BASE, callbacks=[BatchSizeFinder()]).fit(made(place, Loading))


def batch_sizes(place: Place) -> Any:
    """The finder of batch sizes."""
    from lightning.pytorch.tuner import Tuner

    return Tuner(runner(place, BASE)).scale_batch_size(made(place), loaders(BASE)[0])
