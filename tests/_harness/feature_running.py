"""Rows of the feature table: modules and data, stages, checkpoints and launch."""

from tests._harness import feature_modules as modules
from tests._harness import feature_parts as parts
from tests._harness import feature_runs as runs
from tests._harness.feature import SHARDED, refused, works
from tests._harness.feature_runs import SMALL, evaluated, fitted

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
    works("configure_model", "makes the network", fitted(modules.Late)),
    works("LightningDataModule", "with two loaders for validation", runs.with_datamodule),
    works(
        "IterableDataset",
        "the same stream on every rank of a group",
        runs.streamed,
    ),
    works(
        "IterableDataset, data='broadcast'",
        "read by one rank",
        runs.streamed,
        options={"data": "broadcast"},
    ),
    works(
        "shard_in='worker'",
        "batches cut by the collate functions of loaders",
        fitted(case=SMALL),
        options={"shard_in": "worker"},
    ),
    works(
        "on_after_batch_transfer and its kin",
        "see whole batches",
        fitted(modules.Transferring, case=SMALL),
    ),
    refused(
        "shard_in='worker' with an overridden transfer hook",
        "the hook would see parts of batches",
        fitted(modules.Transferring, case=SMALL),
        "so on_after_batch_transfer would see parts of them; use shard_in='auto' or 'main'",
        options={"shard_in": "worker"},
    ),
    refused(
        "A step that takes a dataloader_iter",
        "its batches would not be cut",
        fitted(modules.Iterating),
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
        "two nodes of one process and two of two, on one machine, have the parameters of the plain "
        "Trainer (`tests/dist/test_launch.py`)",
        parts.two_nodes,
        world=1,
        plain=0,
    ),
    works(
        "torchrun",
        "two processes have the loss of one (`tests/test_examples.py`), and two nodes the "
        "parameters of the plain Trainer (`tests/dist/test_launch.py`); the strategy starts none",
        parts.torchrun,
        world=1,
        plain=0,
    ),
    works(
        "SLURM",
        "two processes with the variables of srun have the loss of one "
        "(`tests/test_examples.py`); the strategy starts none",
        parts.slurm,
        world=1,
        plain=0,
    ),
    works(
        "Notebooks",
        "a module of a cell, in IPython's shell and at Python's prompt: processes are forked "
        "(`tests/dist/test_launch.py`)",
        parts.notebook,
        world=1,
        plain=0,
    ),
    works(
        "start_method='fork'",
        "parameters and metrics in the process that called the Trainer; also with `zero_stage=3`, "
        "and also 'spawn' (`tests/dist/test_launch.py`)",
        parts.fork,
        world=1,
        plain=0,
    ),
    refused(
        "start_method='popen' in a notebook",
        "by Lightning: there is no script to run again",
        parts.scripts_in_a_notebook,
        "not compatible with an interactive environment",
        world=1,
    ),
    refused(
        "start_method='fork' under torchrun",
        "the processes exist already",
        parts.fork_under_torchrun,
        "TorchElasticEnvironment says that they have been started already",
        world=1,
    ),
    refused(
        "accelerator='gpu' without a GPU",
        "by Lightning, as with any strategy",
        parts.gpu,
        "No supported gpu backend found",
        world=1,
    ),
]
