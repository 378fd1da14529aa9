"""Rows of the feature table: callbacks, logging and profiling."""

from dataclasses import replace
from datetime import timedelta

from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import TensorBoardLogger

from tests._harness import feature_modules as modules
from tests._harness import feature_parts as parts
from tests._harness import feature_runs as runs
from tests._harness.feature import FOUR, SHARDED, refused, with_callback, works
from tests._harness.feature_runs import BASE, SMALL, fitted

CALLBACKS = [
    works(
        "ModelCheckpoint",
        "names, scores and parameters of the best two and the last",
        fitted(callbacks=parts.checkpoints, more=parts.kept, enable_checkpointing=True),
    ),
    works(
        "OnExceptionCheckpoint",
        "an error in the fourth step: the file is that of one device",
        runs.failing(modules.Failing, enable_checkpointing=True),
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
            modules.Scheduled,
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
        fitted(modules.Example, callbacks=parts.summaries, more=parts.summarised),
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
        fitted(modules.Hyper, options=parts.csv_logger, more=parts.hyperparameters),
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
        fitted(modules.Gathering),
    ),
    works(
        "self.all_gather, sync_dist over virtual devices",
        "on 2 x 2 ranks, against two devices",
        fitted(modules.Gathering),
        world=4,
        options=FOUR,
        plain=2,
    ),
]
