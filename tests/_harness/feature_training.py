"""Rows of the feature table: the length of a run, optimization and precision."""

from dataclasses import replace
from datetime import timedelta

from tests._harness import feature_modules as modules
from tests._harness import feature_parts as parts
from tests._harness import feature_runs as runs
from tests._harness.feature import FOUR, SHARDED, option, refused, works
from tests._harness.feature_runs import BASE, SMALL, evaluated, fitted

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
        fitted(modules.Norms),
    ),
    works(
        "Manual optimization", "one optimizer", fitted(case=replace(BASE, optimisation="manual"))
    ),
    works(
        "Several optimizers",
        "two, by hand: SGD and Adam, a backward and a step of each per batch",
        fitted(modules.TwoOptimizers, case=replace(BASE, optimisation="manual")),
    ),
    works(
        "toggle_optimizer",
        "two optimizers, in turn, with `find_unused_parameters=True`, as with DDP",
        fitted(modules.Toggling, case=replace(BASE, optimisation="manual")),
        options={"find_unused_parameters": True},
    ),
    works(
        "toggle_optimizer with zero_stage=3",
        "two optimizers, in turn",
        fitted(modules.Toggling, case=replace(BASE, optimisation="manual")),
        options=SHARDED,
    ),
    works(
        "Parameters that a step leaves out",
        "every other step, with `find_unused_parameters=True`, as with DDP",
        fitted(modules.Alternating),
        options={"find_unused_parameters": True},
    ),
    works(
        "An optimizer with a closure",
        "LBFGS: the step runs several times for one batch",
        fitted(modules.Quadratic, case=SMALL),
        tolerance=1e-6,
    ),
    works("LR scheduler per step", "ExponentialLR", fitted(modules.Scheduled)),
    works("ReduceLROnPlateau", "follows `val_loss`", fitted(modules.Plateau, max_epochs=4)),
    works("Tuner.lr_find", "curve and suggestion are equal", runs.rates),
    works(
        "Tuner.lr_find with zero_stage=3",
        "with files; with folders in `tests/dist/test_portable.py`",
        runs.rates,
        tolerance=1e-6,
        options={"zero_stage": 3},
    ),
    refused(
        "BatchSizeFinder",
        "one rank may have no memory left when the others have",
        runs.finding_batch_size,
        "BatchSizeFinder tries sizes until one rank has no memory left",
    ),
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
        evaluated("validate", kind=modules.Inference, inference_mode=True),
    ),
    works(
        "inference_mode=False",
        "seen inside the step",
        evaluated("validate", kind=modules.Inference, inference_mode=False),
    ),
    works(
        "use_distributed_sampler=False",
        "on 2 x 2 ranks, against two devices",
        fitted(use_distributed_sampler=False),
        world=4,
        options=FOUR,
        plain=2,
    ),
    works("barebones", "a step that logs nothing", fitted(modules.Quiet, barebones=True)),
    refused(
        "sync_batchnorm",
        "on CPU by torch: `SyncBatchNorm` is for GPUs; not run on a GPU",
        fitted(modules.Normalised, sync_batchnorm=True),
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
        fitted(case=replace(SMALL, precision="bf16-mixed")),
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
        fitted(case=replace(SMALL, precision="16-mixed")),
        tolerance=1e-2,
    ),
]
