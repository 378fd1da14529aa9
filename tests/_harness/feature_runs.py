"""Whole runs of a Trainer with one of its features, which say what is to be compared."""

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.fsdp import whole
from tests._harness.models import Case, LanguageModel, Steps, Text, loaders, trainer_of

BASE = Case(samples=12, epochs=2, precision="64-true", momentum=0.9)
"""Six batches of two rows in each of two epochs."""


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


class Model(LanguageModel):
    """The GPT; what it saw beside the ids is in `seen`."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(tokens)
        return logits

    def predict_step(self, batch: Any, index: int) -> Any:
        """Logits and ids."""
        tokens, _, ids, *rest = self.fields(batch)
        return {"logits": self.net(tokens, *rest), "ids": ids}

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """What a logger would see."""
        metrics = self.trainer.callback_metrics
        if "train_loss_step" in metrics:
            self.logged.append(float(metrics["train_loss_step"]))


def made(place: Place, kind: type[Steps] = Model, case: Case = BASE) -> Any:
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
    kind: type[Steps] = Model,
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


def evaluated(stage: str, *, kind: type[Steps] = Model, case: Case = BASE, **trainer: Any) -> Run:
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


class Failing(Model):
    """Fails in the fourth step, on every rank."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss, or an error."""
        if index == 3:
            raise ArithmeticError("the user's own error")
        return super().training_step(batch, index)


class Inference(Model):
    """Notes whether inference mode is on."""

    def validation_step(self, batch: Any, index: int) -> None:
        """Note, and log the loss."""
        self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        super().validation_step(batch, index)


class Quiet(Model):
    """Logs nothing."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss."""
        self.ids += self.fields(batch)[2].tolist()
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        """Nothing is logged."""
        self.loss(batch)


class Reloading(Model):
    """Makes a loader for every epoch, each with other samples."""

    def train_dataloader(self) -> Any:
        """Samples that nobody has seen."""
        self.seen.append(self.trainer.current_epoch)
        data = Text(self.case, self.case.samples, first=31 * len(self.seen))
        return DataLoader(data, batch_size=self.case.batch)

    def val_dataloader(self) -> Any:
        """The usual samples."""
        return loaders(self.case)[1]


def reloading(place: Place) -> Any:
    """A run with the module's own loaders."""
    model = made(place, Reloading)
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


class Several(Model):
    """Validates on two loaders."""

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        """Log the loss of each."""
        self.log("val_loss", self.loss(batch))


def with_datamodule(place: Place) -> Any:
    """A run with a LightningDataModule."""
    model, runs = made(place, Several), runner(place, BASE)
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


class Scheduled(Model):
    """A scheduler for every step."""

    def configure_optimizers(self) -> Any:
        """SGD that decays with every step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Note the rate."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append([group["lr"] for x in self.trainer.optimizers for group in x.param_groups])


class Plateau(Scheduled):
    """A scheduler that looks at a metric."""

    def configure_optimizers(self) -> Any:
        """Halves the rate at once: the metric is to rise, and falls."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Quadratic(Model):
    """LBFGS calls the step several times for one batch."""

    def configure_optimizers(self) -> Any:
        """Three evaluations of every batch."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoOptimizers(Model):
    """Two optimizers by hand, each with half of the parameters."""

    toggles = False

    def configure_optimizers(self) -> Any:
        """One for the head, one for the rest."""
        head = list(self.net.head.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("head")]
        return [torch.optim.SGD(head, lr=0.2), torch.optim.Adam(rest, lr=1e-3, eps=1e-3)]

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        """A backward and a step of each."""
        self.ids += self.fields(batch)[2].tolist()
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


class Toggling(TwoOptimizers):
    """Only the parameters of the running optimizer have gradients."""

    toggles = True


class Alternating(Model):
    """Uses a layer in every other step."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, index: int) -> Tensor:
        """With the layer, or without."""
        loss = super().training_step(batch, index)
        more: Tensor = 0.1 * (self.scale - 2).square().sum()
        return loss + more if index % 2 else loss


class Hyper(Model):
    """Saves its hyperparameters."""

    def __init__(self, case: Case, dense: bool = False, width: int = 5) -> None:
        super().__init__(case, dense)
        self.save_hyperparameters("width")


class Gathering(Model):
    """Collects a value of every virtual device, and logs its mean."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Gather ids and losses, in shape and values."""
        loss = super().training_step(batch, index)
        both: Any = self.all_gather({"ids": batch["id"], "loss": loss.detach()})
        self.seen.append({name: value.numpy() for name, value in both.items()})
        self.log("synced", loss, sync_dist=True, on_epoch=True, on_step=False)
        self.log_dict({"a": loss, "b": 2 * loss}, prog_bar=True, on_epoch=True, on_step=False)
        return loss


class Norms(Model):
    """Looks at gradients before they are used."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the norm of every gradient."""
        from lightning.pytorch.utilities import grad_norm

        norms = grad_norm(self, norm_type=2)
        self.seen.append({name: float(value) for name, value in norms.items()})

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip to a tenth."""
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Late(Model):
    """Makes its network in configure_model."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.made_at, self.held = self.net, self.net
        del self.net

    def configure_model(self) -> None:
        """Make it, once."""
        if not hasattr(self, "net"):
            self.net = self.held
            del self.held, self.made_at


class Iterating(Model):
    """Takes the iterator."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        """Fetch a batch."""
        return self.loss(next(dataloader_iter)[0])


class Normalised(Model):
    """Has a batch norm beside the network."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.statistics = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Use both."""
        norm = self.statistics(torch.ones(2, 4, dtype=torch.float64))
        loss: Tensor = super().training_step(batch, index) + 0 * norm.sum()
        return loss


class Example(Model):
    """Has an example input for the summary."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.example_input_array = torch.zeros(2, 24, dtype=torch.int64)


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

    class Rated(Model):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model, runs = made(place, Rated), runner(place, replace(BASE, epochs=10))
    train = loaders(BASE)[0]
    finder: Any = Tuner(runs).lr_find(model, train, num_training=20, early_stop_threshold=None)
    return {**finder.results, "suggestion": finder.suggestion(), "parameters": parameters(model)}


def batch_sizes(place: Place) -> Any:
    """The finder of batch sizes."""
    from lightning.pytorch.tuner import Tuner

    return Tuner(runner(place, BASE)).scale_batch_size(made(place), loaders(BASE)[0])


def differences(one: Any, other: Any, where: str = "") -> list[tuple[str, float]]:
    """Numbers that differ, with their distance; infinite where something else does.

    Args:
        one: what was found: containers, arrays, numbers, text.
        other: what was expected.
        where: name of the place.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [(f"{where}: keys {sorted(one.keys() ^ other.keys())}", np.inf)]
        return [x for key in one for x in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [(f"{where}: {len(one)} for {len(other)}", np.inf)]
        pairs = enumerate(zip(one, other, strict=True))
        return [x for index, (a, b) in pairs for x in differences(a, b, f"{where}.{index}")]
    if isinstance(one, float | np.ndarray) and isinstance(other, float | np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        if a.shape != b.shape:
            return [(f"{where}: shape {a.shape} for {b.shape}", np.inf)]
        far = np.abs(a - b) / np.maximum(np.abs(b), 1)
        return [(where, float(far.max()))] if far.size else []
    return [] if one == other else [(f"{where}: {one!r} for {other!r}", np.inf)]
