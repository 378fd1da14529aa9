"""Callbacks, loggers and Trainers that the rows of the feature table use."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize

from lightning_cp import ContextParallelStrategy
from tests._harness.feature_modules import Example
from tests._harness.feature_runs import BASE, Place, fitted, made, runner, table
from tests._harness.models import loaders


def stopping_at_once(place: Place) -> list[Any]:
    """Stops as soon as the validation loss falls."""
    return [cb.EarlyStopping("val_loss", mode="max", patience=1)]


def csv_logger(place: Place) -> dict[str, Any]:
    """The option of a CSV logger."""
    return {"logger": CSVLogger(place.folder, flush_logs_every_n_steps=1)}


def checkpoints(place: Place) -> list[Any]:
    """Keeps the best two of four, and the last."""
    return [
        cb.ModelCheckpoint(
            place.folder,
            "{epoch}-{step}",
            monitor="train_loss_step",
            save_top_k=2,
            save_last=True,
            every_n_train_steps=3,
        )
    ]


def kept(place: Place, trainer: pl.Trainer) -> Any:
    """Files of a ModelCheckpoint, with parameters and scores."""
    trainer.strategy.barrier()
    callback: Any = trainer.checkpoint_callback
    files = {}
    for file in sorted(place.folder.glob("*.ckpt")):
        content = torch.load(file, weights_only=False)
        files[file.name] = {name: value.numpy() for name, value in content["state_dict"].items()}
    assert len(files) == 3
    return Path(callback.best_model_path).name, float(callback.best_model_score), files


def ema(place: Place) -> Any:
    """Moving average of the parameters."""
    return cb.EMAWeightAveraging(decay=0.9)


class Thawing(cb.BaseFinetuning):
    """Trains the head alone in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze all but the head."""
        net = pl_module.net
        self.freeze([net.tokens, net.places, net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Thaw in the second."""
        net = pl_module.net
        if epoch == 1:
            rest = [net.tokens, net.places, net.blocks]
            self.unfreeze_and_add_param_group(rest, optimizer, lr=0.1)


def pruning(place: Place) -> Any:
    """Prunes twice; a rank sees its own copy of the parameters, which are equal."""

    class Pruning(cb.ModelPruning):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            net = pl_module.net
            pairs = [(net.head, "weight"), (net.blocks[0].mlp[1], "weight")]
            self._parameters_to_prune = pairs
            super().setup(trainer, pl_module, stage)

    return Pruning("l1_unstructured", parameters_to_prune=(), amount=0.5)


def throughput(place: Place) -> list[Any]:
    """Counts rows and tokens."""
    return [
        cb.ThroughputMonitor(
            batch_size_fn=lambda batch: len(batch["id"]),
            length_fn=lambda batch: batch["input_ids"].numel(),
            window_size=2,
        )
    ]


def counted(place: Place, trainer: pl.Trainer) -> Any:
    """What a ThroughputMonitor counted; tokens of a rank add up to those of one device."""
    (monitor,) = (x for x in trainer.callbacks if isinstance(x, cb.ThroughputMonitor))  # type: ignore[attr-defined]
    lengths = {str(k.value): v * place.world for k, v in monitor._lengths.items()}
    counts = [lengths]
    for name in ("_samples", "_batches"):  # since Lightning 2.6
        counts.append({str(k.value): v for k, v in getattr(monitor, name, {}).items()})
    return trainer.strategy.broadcast(counts)  # the first rank counts


def device_stats(place: Place) -> Any:
    """A run with a DeviceStatsMonitor."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.callbacks import device_stats_monitor

    def stats(self: Any, device: Any) -> dict[str, Any]:
        return {"cpu_percent": 5.0}

    run = fitted(
        callbacks=lambda place: [cb.DeviceStatsMonitor()],
        options=csv_logger,
        more=table,
        log_every_n_steps=1,
    )
    with (
        mock.patch.object(CPUAccelerator, "get_device_stats", stats),
        mock.patch.object(device_stats_monitor, "_PSUTIL_AVAILABLE", True),
    ):
        outcome = run(place)
    assert any("percent" in name for row in outcome["more"] for name in row)
    return outcome


def summaries(place: Place) -> list[Any]:
    """A deep summary."""
    return [cb.ModelSummary(max_depth=3)]


def summarised(place: Place, trainer: pl.Trainer) -> Any:
    """Layers, sizes and parameters."""
    module = trainer.lightning_module
    assert isinstance(module, Example)
    summary = summarize(module, max_depth=3)
    layers = [
        (x.layer_type, str(x.in_size), str(x.out_size)) for x in summary._layer_summary.values()
    ]
    return layers, summary.param_nums, summary.total_parameters


def noting(place: Place) -> list[Any]:
    """A LambdaCallback that notes rows and tokens of every batch."""
    notes: list[tuple[int, int]] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        notes.append(tuple(batch["input_ids"].shape))

    callback = cb.LambdaCallback(on_train_batch_end=note)
    callback.notes = notes  # type: ignore[attr-defined]
    return [callback]


def noted(place: Place, trainer: pl.Trainer) -> Any:
    """Rows, and tokens of all ranks."""
    (callback,) = (x for x in trainer.callbacks if hasattr(x, "notes"))  # type: ignore[attr-defined]
    assert callback.notes
    return [(rows, tokens * place.world) for rows, tokens in callback.notes]


def events(place: Place, trainer: pl.Trainer) -> Any:
    """Scalars that TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    trainer.strategy.barrier()
    files = sorted(place.folder.rglob("events.out.tfevents.*"))
    assert len(files) == 1
    read = EventAccumulator(str(files[0]))
    read.Reload()
    names = read.Tags()["scalars"]
    assert "train_loss_step" in names
    return {name: [(x.step, float(x.value)) for x in read.Scalars(name)] for name in names}


def hyperparameters(place: Place, trainer: pl.Trainer) -> Any:
    """What the checkpoint and the logger's folder have of them."""
    file = place.folder / "saved.ckpt"
    trainer.save_checkpoint(file)
    content = torch.load(file, weights_only=False)["hyper_parameters"]
    written = [x.read_text() for x in sorted(place.folder.rglob("hparams.yaml"))]
    assert content == {"width": 5}
    assert written
    return content, written


def profiler(name: str) -> Callable[[Place], dict[str, Any]]:
    """Options of a Trainer with a profiler that writes into the folder of the run."""
    kinds: dict[str, Any] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }

    def options(place: Place) -> dict[str, Any]:
        more = {"schedule": None} if name == "pytorch" else {}
        return {"profiler": kinds[name](dirpath=place.folder, filename="profile", **more)}

    return options


def compiled_module(place: Place) -> Any:
    """A run of a compiled LightningModule."""
    model = made(place)
    compiled: Any = torch.compile(model, backend="eager")
    runner(place, BASE).fit(compiled, *loaders(BASE))


def compile_net(model: Any) -> None:
    """Compile the network of a module."""
    model.net = torch.compile(model.net, backend="aot_eager")


def _trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator=options.pop("accelerator", "cpu"), **{**quiet, **options})


def _strategy(**options: Any) -> ContextParallelStrategy:
    strategy = _trainer(**{"strategy": "context_parallel", **options}).strategy
    assert isinstance(strategy, ContextParallelStrategy)
    return strategy


def two_nodes(place: Place) -> None:
    """Sizes and ranks of the second node."""
    with mock.patch.dict(os.environ, {"NODE_RANK": "1"}):
        strategy = _strategy(devices=2, num_nodes=2)
        assert (strategy.num_nodes, strategy.num_processes, strategy.world_size) == (2, 2, 4)
        assert strategy.global_rank == 2
        strategy._resolve(strategy.world_size, strategy.num_processes)
        assert (strategy.topology.dp, strategy.topology.cp) == (2, 2)
        assert strategy.launcher is not None


@contextmanager
def _under_torchrun() -> Iterator[None]:
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    names |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    names |= {"TORCHELASTIC_RUN_ID": "1"}
    with mock.patch.dict(os.environ, names):
        yield


def torchrun(place: Place) -> None:
    """What torchrun sets is found."""
    with _under_torchrun():
        _found_environment("TorchElasticEnvironment")


def slurm(place: Place) -> None:
    """What srun sets is found."""
    names = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "1"}
    names |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"}
    names |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    with mock.patch.dict(os.environ, names):
        _found_environment("SLURMEnvironment")


def _found_environment(name: str) -> None:
    strategy = _strategy(devices=2)
    environment: Any = strategy.cluster_environment
    assert type(environment).__name__ == name
    assert environment.creates_processes_externally
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (1, 1, 2)
    strategy._configure_launcher()
    strategy._resolve(strategy.world_size, strategy.num_processes)
    assert (strategy.topology.dp, strategy.topology.cp) == (1, 2)


@contextmanager
def _interactive() -> Iterator[None]:
    name = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"
    flavor = ContextParallelStrategy._flavor
    with mock.patch(name, True), mock.patch.object(flavor, "interactive", True):
        yield


def notebook(place: Place) -> None:
    """A Trainer in an interactive session."""
    with _interactive():
        launcher: Any = _strategy(devices=2).launcher
        assert launcher._start_method == "fork"


def scripts_in_a_notebook(place: Place) -> None:
    """The other way to start processes in an interactive session."""
    with _interactive():
        _strategy(devices=2, strategy=ContextParallelStrategy(start_method="popen"))


def fork(place: Place) -> None:
    """The processes of one run; see `tests._harness.launched` for what they give."""
    strategy = _strategy(devices=2, strategy=ContextParallelStrategy(start_method="fork"))
    launcher: Any = strategy.launcher
    assert launcher._start_method == "fork"
    assert launcher.is_interactive_compatible


def fork_under_torchrun(place: Place) -> None:
    """Processes that each of several would start."""
    with _under_torchrun():
        _strategy(devices=2, strategy=ContextParallelStrategy(start_method="fork"))


def gpu(place: Place) -> None:
    """A Trainer on GPUs, of which a rank of the pool sees none."""
    with mock.patch("torch.cuda.device_count", return_value=0):
        _trainer(devices=2, strategy="context_parallel", accelerator="gpu")
