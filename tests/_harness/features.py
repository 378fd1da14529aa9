"""The features of a Trainer, each with a run that shows what becomes of it.

`python -m tests._harness.features` writes the table of docs/lightning-features.md.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import TensorBoardLogger

from tests._harness import feature_parts as parts
from tests._harness import feature_runs as runs
from tests._harness.feature_runs import BASE, Place, Run, evaluated, fitted

PAGE = Path(__file__).parents[2] / "docs" / "lightning-features.md"
SHARDED = {"zero_stage": 3}
FOUR = {"context_parallel_size": 2}
SMALL = replace(BASE, samples=8, epochs=1)
STREAM = {"data": "broadcast"}


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
        name: what it is.
        how: how it was used, what was seen; the note of the table.
        expectation: "works": the outcome of the run is that of the plain Trainer; "refused": the
            run ends with `message` on every rank.
        check: the run; what it returns is compared.
        message: regular expression for the error.
        tolerance: largest difference of a number, relative above 1.
        world: number of ranks.
        options: of the strategy.
        plain: devices of the plain Trainer; 0: the run checks by itself and is compared to nothing.
    """

    name: str
    how: str
    expectation: Literal["works", "refused"]
    check: Run
    message: str = ""
    tolerance: float = 1e-10
    world: int = 2
    options: Mapping[str, Any] = {}
    plain: int = 1


def works(name: str, how: str, check: Run, **more: Any) -> Feature:
    """A feature that gives what it gives on one device."""
    return Feature(name, how, "works", check, **more)


def refused(name: str, how: str, check: Run, message: str, **more: Any) -> Feature:
    """A feature that stops the run with a message."""
    return Feature(name, how, "refused", check, message, **more)


def option(
    name: str, how: str = "", *, also: Mapping[str, Any] | None = None, **given: Any
) -> Feature:
    """An option of the Trainer that works in `fit`."""
    shown = ", ".join(f"`{key}={value!r}`" for key, value in given.items())
    return works(name, shown + (f"; {how}" if how else ""), fitted(**given, **(also or {})))


def with_callback(name: str, how: str, make: Callable[[Place], Any], **more: Any) -> Feature:
    """A callback that works in `fit`."""
    return works(name, how, fitted(callbacks=lambda place: [make(place)], **more))


DURATION = [
    option("max_epochs", max_epochs=3),
    option("max_steps", max_steps=3, max_epochs=-1),
    works(
        "min_epochs",
        "`min_epochs=2`, with an EarlyStopping that would stop after the first of four",
        fitted(callbacks=parts.stopping_at_once, min_epochs=2, max_epochs=4),
    ),
    works(
        "min_steps",
        "`min_steps=9`, with an EarlyStopping that would stop after 6",
        fitted(callbacks=parts.stopping_at_once, min_steps=9, max_epochs=4),
    ),
    works(
        "max_time",
        "no time at all: all ranks stop after the same batch",
        fitted(max_time=timedelta(0), max_epochs=3),
    ),
    option("overfit_batches", overfit_batches=2),
    option("fast_dev_run", fast_dev_run=2),
    option("limit_train_batches", limit_train_batches=4),
    option("limit_train_batches, a fraction", limit_train_batches=0.5),
    option("limit_val_batches", limit_val_batches=1),
    works("limit_test_batches", "`limit_test_batches=2`", evaluated("test", limit_test_batches=2)),
    works(
        "limit_predict_batches",
        "`limit_predict_batches=2`",
        evaluated("predict", limit_predict_batches=2),
    ),
    option("val_check_interval", val_check_interval=2),
    option("val_check_interval, a fraction", val_check_interval=0.5),
    option("check_val_every_n_epoch", check_val_every_n_epoch=2, max_epochs=4),
    option("num_sanity_val_steps", num_sanity_val_steps=2),
    works(
        "reload_dataloaders_every_n_epochs",
        "every epoch, with other samples each time",
        runs.reloading,
    ),
]

TRAINING = [
    option("accumulate_grad_batches", accumulate_grad_batches=4, how="6 batches: a rest of 2"),
    option("gradient_clip_val by norm", gradient_clip_val=0.1),
    option("gradient_clip_val by value", gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
    works(
        "configure_gradient_clipping, grad_norm",
        "overridden; norms seen in `on_before_optimizer_step` are equal",
        fitted(runs.Norms),
    ),
    works(
        "Manual optimization", "one optimizer", fitted(case=replace(BASE, optimisation="manual"))
    ),
    works(
        "Several optimizers",
        "two, by hand: SGD and Adam, a backward and a step of each per batch",
        fitted(runs.TwoOptimizers, case=replace(BASE, optimisation="manual")),
    ),
    works(
        "toggle_optimizer",
        "two optimizers, in turn, with `find_unused_parameters=True`, as with DDP",
        fitted(runs.Toggling, case=replace(BASE, optimisation="manual")),
        options={"find_unused_parameters": True},
    ),
    works(
        "toggle_optimizer with zero_stage=3",
        "two optimizers, in turn",
        fitted(runs.Toggling, case=replace(BASE, optimisation="manual")),
        options=SHARDED,
    ),
    works(
        "Parameters that a step leaves out",
        "every other step, with `find_unused_parameters=True`, as with DDP",
        fitted(runs.Alternating),
        options={"find_unused_parameters": True},
    ),
    works(
        "An optimizer with a closure",
        "LBFGS: the step runs several times for one batch",
        fitted(runs.Quadratic, case=SMALL),
        tolerance=1e-6,
    ),
    works("LR scheduler per step", "ExponentialLR", fitted(runs.Scheduled)),
    works("ReduceLROnPlateau", "follows `val_loss`", fitted(runs.Plateau, max_epochs=4)),
    works("Tuner.lr_find", "curve and suggestion are equal", runs.rates),
    refused(
        "Tuner.scale_batch_size",
        "by Lightning, for every distributed strategy: find the size on one device",
        runs.batch_sizes,
        "not supported with distributed strategies",
    ),
    option("detect_anomaly", detect_anomaly=True),
    option("deterministic", deterministic=True),
    option(
        "benchmark",
        benchmark=False,
        how="a setting of cuDNN: it is passed on, and CPU runs ignore it",
    ),
    works(
        "inference_mode=True",
        "seen inside the step",
        evaluated("validate", kind=runs.Inference, inference_mode=True),
    ),
    works(
        "inference_mode=False",
        "seen inside the step",
        evaluated("validate", kind=runs.Inference, inference_mode=False),
    ),
    works(
        "use_distributed_sampler=False",
        "on 2 x 2 ranks, against two devices",
        fitted(use_distributed_sampler=False),
        world=4,
        options=FOUR,
        plain=2,
    ),
    works("barebones", "a step that logs nothing", fitted(runs.Quiet, barebones=True)),
    refused(
        "sync_batchnorm",
        "on CPU by torch: `SyncBatchNorm` is for GPUs; not run on a GPU",
        fitted(runs.Normalised, sync_batchnorm=True),
        "SyncBatchNorm layers only work with GPU modules",
    ),
]

PRECISION = [
    works("precision 64-true", "equal to 1e-10", fitted()),
    works(
        "precision 32-true",
        "equal to 2e-6",
        fitted(case=replace(BASE, precision="32-true")),
        tolerance=2e-6,
    ),
    works(
        "precision bf16-mixed",
        "equal to 1e-2",
        fitted(case=replace(BASE, precision="bf16-mixed")),
        tolerance=1e-2,
    ),
    works(
        "precision bf16-true",
        "equal to 5e-2",
        fitted(case=replace(BASE, precision="bf16-true", epochs=1)),
        tolerance=5e-2,
    ),
    works(
        "precision 16-mixed",
        "on CPU Lightning takes bf16-mixed in its place, and says so; not run on a GPU",
        fitted(case=replace(BASE, precision="16-mixed")),
        tolerance=1e-2,
    ),
]

CALLBACKS = [
    works(
        "ModelCheckpoint",
        "names, scores and parameters of the best two and the last",
        fitted(callbacks=parts.checkpoints, more=parts.kept, enable_checkpointing=True),
    ),
    works(
        "OnExceptionCheckpoint",
        "an error in the fourth step: the file is that of one device",
        runs.failing(runs.Failing, enable_checkpointing=True),
    ),
    works(
        "EarlyStopping",
        "stops after two of four epochs",
        fitted(callbacks=parts.stopping_at_once, max_epochs=4),
    ),
    works(
        "LearningRateMonitor",
        "rows of the CSV file",
        fitted(
            runs.Scheduled,
            callbacks=lambda place: [cb.LearningRateMonitor("step")],
            options=parts.csv_logger,
            more=runs.table,
            log_every_n_steps=1,
        ),
    ),
    with_callback(
        "StochasticWeightAveraging",
        "from the second of four epochs",
        lambda place: cb.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        max_epochs=4,
    ),
    refused(
        "StochasticWeightAveraging with zero_stage=3",
        "it copies a module that is not sharded yet",
        fitted(callbacks=lambda place: [cb.StochasticWeightAveraging(0.05)]),
        "StochasticWeightAveraging keeps a copy",
        options=SHARDED,
    ),
    with_callback("WeightAveraging (EMA)", "`EMAWeightAveraging`, of every step", parts.ema),
    refused(
        "WeightAveraging with zero_stage=3",
        "it copies a module that is not sharded yet",
        fitted(callbacks=lambda place: [parts.ema(place)]),
        "keeps a copy of the module from before",
        options=SHARDED,
    ),
    with_callback(
        "GradientAccumulationScheduler",
        "`{0: 1, 1: 3}`",
        lambda place: cb.GradientAccumulationScheduler({0: 1, 1: 3}),
    ),
    with_callback(
        "BackboneFinetuning",
        "the network is frozen, and trained from the second of three epochs on",
        lambda place: parts.Thawing(),
        max_epochs=3,
    ),
    with_callback(
        "BackboneFinetuning with zero_stage=3",
        "the same",
        lambda place: parts.Thawing(),
        max_epochs=3,
    )._replace(options=SHARDED),
    with_callback(
        "ModelPruning",
        "half of two layers, in float32, equal to 2e-6",
        parts.pruning,
        case=replace(BASE, precision="32-true"),
    )._replace(tolerance=2e-6),
    works(
        "ThroughputMonitor",
        "counts are equal; a `length_fn` gets this rank's part of the batch",
        fitted(
            callbacks=parts.throughput,
            options=parts.csv_logger,
            more=parts.counted,
            log_every_n_steps=1,
        ),
    ),
    works(
        "DeviceStatsMonitor",
        "with a stand-in for the CPU's numbers, which need `psutil`",
        parts.device_stats,
    ),
    works(
        "ModelSummary with example_input_array",
        "counts and sizes of outputs",
        fitted(runs.Example, callbacks=parts.summaries, more=parts.summarised),
    ),
    works(
        "TQDMProgressBar",
        "runs; what it prints is not compared",
        fitted(callbacks=lambda place: [cb.TQDMProgressBar()], enable_progress_bar=True),
    ),
    works(
        "RichProgressBar, RichModelSummary",
        "run; what they print is not compared",
        fitted(
            callbacks=lambda place: [cb.RichProgressBar(), cb.RichModelSummary()],
            enable_progress_bar=True,
            enable_model_summary=True,
        ),
    ),
    with_callback("Timer", "with time to spare", lambda place: cb.Timer(timedelta(hours=1))),
    works(
        "LambdaCallback",
        "the batch that a hook gets is this rank's part, with all its rows",
        fitted(callbacks=parts.noting, more=parts.noted),
    ),
    works("BasePredictionWriter", "one file per virtual device", runs.written),
]

LOGGING = [
    works(
        "CSVLogger",
        "all rows",
        fitted(options=parts.csv_logger, more=runs.table, log_every_n_steps=1),
    ),
    works(
        "log_every_n_steps",
        "`log_every_n_steps=4`, rows of the CSV file",
        fitted(options=parts.csv_logger, more=runs.table, log_every_n_steps=4),
    ),
    works(
        "TensorBoardLogger",
        "all scalars of the event file",
        fitted(
            options=lambda place: {"logger": TensorBoardLogger(place.folder)},
            more=parts.events,
            log_every_n_steps=1,
        ),
        tolerance=1e-6,
    ),
    works(
        "save_hyperparameters",
        "in the checkpoint and in the logger's file",
        fitted(runs.Hyper, options=parts.csv_logger, more=parts.hyperparameters),
    ),
    *(
        works(
            f"profiler {name}",
            "the same steps with it as on one device; its report is not compared",
            fitted(options=parts.profiler(name), case=SMALL),
        )
        for name in ("simple", "advanced", "pytorch")
    ),
    works(
        "self.log with sync_dist, log_dict",
        "and `self.all_gather`, on one virtual device",
        fitted(runs.Gathering),
    ),
    works(
        "self.all_gather, sync_dist over virtual devices",
        "on 2 x 2 ranks, against two devices",
        fitted(runs.Gathering),
        world=4,
        options=FOUR,
        plain=2,
    ),
]

MODULES = [
    refused(
        "torch.compile of the LightningModule",
        "by Lightning; compile its network",
        parts.compiled_module,
        "Using a compiled model is incompatible with the current strategy",
    ),
    works(
        "torch.compile of its network",
        "with the backend `aot_eager`",
        fitted(prepare=parts.compile_net, case=SMALL),
    ),
    works("configure_model", "makes the network", fitted(runs.Late)),
    works("LightningDataModule", "with two loaders for validation", runs.with_datamodule),
    works(
        "IterableDataset",
        "the same stream on every rank of a group",
        runs.streamed,
    ),
    works("IterableDataset, data='broadcast'", "read by one rank", runs.streamed, options=STREAM),
    refused(
        "A step that takes a dataloader_iter",
        "its batches would not be cut",
        fitted(runs.Iterating),
        "takes a dataloader_iter: its batches do not pass through the strategy",
    ),
]

RUNNING = [
    works("fit", "with validation", fitted()),
    works("validate", "all metrics", evaluated("validate")),
    works("test", "all metrics", evaluated("test")),
    works("predict", "whole rows in their order, on the first rank", evaluated("predict")),
    works("Several runs of one Trainer", "fit, validate, test, predict, fit", runs.twice),
    works(
        "save_checkpoint and ckpt_path",
        "saved by all ranks, resumed after an epoch",
        runs.resumed(),
    ),
    works("zero_stage=0", "named", fitted(), options={"zero_stage": 0}),
    works("zero_stage=3", "parameters sharded over the ranks", fitted(), options=SHARDED),
    works(
        "zero_stage=3, save_checkpoint and ckpt_path",
        "saved by all ranks, resumed after an epoch; equal to 1e-6, because one device reads "
        "float64 parameters into a module in float32 and converts it later",
        runs.resumed(),
        tolerance=1e-6,
        options=SHARDED,
    ),
    works("devices=1", "equal bit by bit", fitted(), world=1, tolerance=0.0),
    works(
        "num_nodes",
        "construction only: two nodes of two, and ranks 2 and 3 on the second",
        parts.two_nodes,
        world=1,
        plain=0,
    ),
    works(
        "torchrun",
        "construction only: Lightning finds `TorchElasticEnvironment` and the strategy starts "
        "no processes",
        parts.torchrun,
        world=1,
        plain=0,
    ),
    works(
        "SLURM",
        "construction only: Lightning finds `SLURMEnvironment`; the strategy starts no processes",
        parts.slurm,
        world=1,
        plain=0,
    ),
    refused(
        "Notebooks",
        "by Lightning: processes are started as scripts; construction only",
        parts.notebook,
        "not compatible with an interactive environment",
        world=1,
    ),
    refused(
        "The name context_parallel_fork",
        "by Lightning: there is no such name; construction only",
        parts.fork,
        "invalid strategy name",
        world=1,
    ),
    refused(
        "accelerator='gpu' without a GPU",
        "by Lightning, as with any strategy; construction only",
        parts.gpu,
        "No supported gpu backend found",
        world=1,
    ),
]

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
- **refused**: the run stops on every rank with a message that says why.
- **construction only**: a Trainer was made, and nothing was run with it.

Nothing here was run on a GPU or on several nodes."""


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
