"""Checkpoints of Lightning's other strategies and back, its tools, and saves that go on or fail."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

from lightning_cp.fsdp import whole
from lightning_cp.plugin.strategy import AsideCheckpointIO
from tests._harness.models import Case, LanguageModel, Outcome, loaders, outcome, seeded, trainer_of
from tests._harness.resumed import fit_resuming, moved, second_epoch
from tests._harness.rows import assert_same
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import pool_trainer

pytestmark = [pytest.mark.dist, needs_sharding]

ONE, TWO = Case(momentum=0.9), Case(momentum=0.9, epochs=2)
FILE = {"zero_stage": 3}
FOLDER = {**FILE, "save_distributed_checkpoint": True}
ASYNC = {**FILE, "save_distributed_checkpoint": "async"}


class ForModelParallel(LanguageModel):
    """As Lightning's own strategy for FSDP2 wants it."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None:
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])


def theirs(rank: int, world: int, case: Case, folder: bool) -> pl.Trainer:
    """The Trainer with the strategy of Lightning that can run on a CPU and shards parameters."""
    strategy = ModelParallelStrategy(
        data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=folder
    )
    return pool_trainer(
        rank, world, strategy, max_epochs=case.epochs, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip


def fit_theirs(
    rank: int, world: int, case: Case, path: Path, *, folder: bool = False, go_on: bool = False
) -> Outcome:
    """Every rank reads the same; save an epoch, or go on from one."""
    model: Any = (moved if go_on else seeded)(case)
    model.__class__ = ForModelParallel
    run = theirs(rank, world, case, folder)
    run.fit(model, *loaders(case), ckpt_path=path if go_on else None)
    if not go_on:
        run.save_checkpoint(path)
    return outcome(run, model)


def fit_saving(
    rank: int, world: int, case: Case, options: dict[str, Any] | None, path: Path
) -> Outcome:
    model = seeded(case)
    run = trainer_of(rank, world, case, options)
    run.fit(model, *loaders(case))
    run.save_checkpoint(path)
    return outcome(run, model)


def from_theirs(rank: int, world: int, case: Case, folder: bool, path: Path) -> Outcome:
    return fit_theirs(rank, world, case, path, folder=folder)


def go_on_theirs(rank: int, world: int, case: Case, path: Path) -> Outcome:
    return fit_theirs(rank, world, case, path, go_on=True)


@pytest.fixture(scope="module")
def second(plain):
    (found,) = plain(TWO)
    return second_epoch(found, TWO)


@pytest.mark.parametrize("folder", [False, True])
def test_what_model_parallel_strategy_saved(folder, second, pool, tmp_path):
    path = tmp_path / "theirs.ckpt"
    pool.run(from_theirs, ONE, folder, path, world=2)
    assert path.is_dir() == folder
    for found in pool.run(fit_resuming, TWO, FILE, path, world=2):
        assert_same(found, second, 1e-6)


@pytest.mark.parametrize(
    "options", [FILE, *(pytest.param(x, marks=pytest.mark.full) for x in ({}, None))]
)
def test_what_model_parallel_strategy_reads(options, second, pool, tmp_path):
    """Its own files have the content of those of one device, and so have those of FSDPStrategy."""
    path = tmp_path / "ours.ckpt"
    pool.run(fit_saving, ONE, options, path, world=1 if options is None else 2)
    for found in pool.run(go_on_theirs, TWO, path, world=2):
        assert_same(found, second, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_tool_of_lightning_makes_a_file_of_a_folder(momentum, plain, pool, tmp_path):
    """With and without state of the optimizer."""
    one, two = Case(momentum=momentum), Case(momentum=momentum, epochs=2)
    path, file = tmp_path / "last.ckpt", tmp_path / "one.ckpt"
    found = pool.run(fit_saving, one, FOLDER, path, world=2)[0]
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    command = [sys.executable, "-m", tool, str(path), "--output_file", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    model = LanguageModel.load_from_checkpoint(file, case=one)
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), found.parameters[name]), name
    (resumed,) = pool.run(fit_resuming, two, None, file, world=1)
    (expected,) = plain(two)
    assert_same(resumed, second_epoch(expected, two), 1e-6)


def fit_weights(rank: int, world: int, options: dict[str, Any], folder: Path) -> Outcome:
    callback = ModelCheckpoint(folder, filename="weights", save_weights_only=True)
    model = seeded(ONE)
    run = trainer_of(rank, world, ONE, options, enable_checkpointing=True, callbacks=[callback])
    run.fit(model, *loaders(ONE))
    found = outcome(run, model)
    other = moved(ONE)
    again = trainer_of(rank, world, ONE, options)
    again.test(other, loaders(ONE)[1], ckpt_path=folder / "weights.ckpt", verbose=False)
    assert again.callback_metrics["val_loss"] == pytest.approx(found.metrics["val_loss"], rel=1e-6)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer_of(rank, world, ONE, options).fit(
            moved(ONE), *loaders(ONE), ckpt_path=folder / "weights.ckpt"
        )
    return found


@pytest.mark.parametrize("options", [FILE, FOLDER])
def test_weights_alone(options, pool, tmp_path):
    found = pool.run(fit_weights, options, tmp_path, world=2)[0]
    if options is FILE:
        model = LanguageModel.load_from_checkpoint(tmp_path / "weights.ckpt", case=ONE)
        for name, value in model.state_dict().items():
            assert np.array_equal(value.numpy(), found.parameters[name]), name


class Slow(Callback):
    """Saves after every batch; remembers parameters and what was there a moment later."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, dict[str, Any]()
        self.pending: list[bool] = []
        self.there: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        name = f"{batch_idx}.ckpt"
        trainer.save_checkpoint(self.folder / name)
        if batch_idx:
            trainer.strategy.remove_checkpoint(self.folder / f"{batch_idx - 1}.ckpt")
        self.pending.append(trainer.strategy._pending is not None)
        self.there.append(sorted(x.name for x in self.folder.glob("*.ckpt")))
        values = {key: whole(x, keep=True) for key, x in module.named_parameters()}
        self.before[name] = {key: x.detach().numpy().copy() for key, x in values.items()}


def fit_async(rank: int, world: int, folder: Path) -> tuple[Any, ...]:
    slow, model = Slow(folder), seeded(ONE)
    write = FileSystemWriter.write_data

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.3)
        return write(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", late)
        trainer_of(rank, world, ONE, ASYNC, callbacks=[slow]).fit(model, *loaders(ONE))
    names = [thread.name for thread in threading.enumerate()]
    left = [name for name in names if "heckpoint" in name]
    return slow.pending, slow.there, slow.before["2.ckpt"], left


def test_training_goes_on_while_a_folder_is_written(pool, tmp_path):
    """The folder has the parameters of its step; the one before stays until it is complete."""
    ranks = pool.run(fit_async, tmp_path, world=2)
    for pending, there, _, threads in ranks:
        assert pending == [True, True, True]
        assert there == [[], ["0.ckpt"], ["1.ckpt"]]
        assert threads == []
    assert [x.name for x in tmp_path.iterdir()] == ["2.ckpt"]
    expected = ranks[1][2]
    for name, value in pool.run(parameters_in, FILE, tmp_path / "2.ckpt", world=2)[1].items():
        assert np.array_equal(value, expected[name]), name


def parameters_in(rank: int, world: int, options: dict[str, Any], path: Path) -> dict[str, Any]:
    model = moved(ONE)
    run = trainer_of(rank, world, ONE, options)
    run.validate(model, loaders(ONE)[1], ckpt_path=path, verbose=False)
    return outcome(run, model).parameters


def fit_failing(rank: int, world: int, options: dict[str, Any], path: Path, culprit: int) -> None:
    """The second save fails on one rank."""
    model = seeded(ONE)

    class Twice(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx < 2:
                trainer.save_checkpoint(path)
            if batch_idx == 0 and trainer.strategy._pending is not None:
                trainer.strategy._pending.error()
            if batch_idx == 0 and rank == culprit:
                patch.setattr(FileSystemWriter, "write_data", full)
                patch.setattr(TorchCheckpointIO, "save_checkpoint", full)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        trainer_of(rank, world, ONE, options, callbacks=[Twice()]).fit(model, *loaders(ONE))


@pytest.mark.parametrize(
    ("options", "culprit"), [(FILE, 0), (FOLDER, 1), (ASYNC, 1), ({}, 0)], ids=str
)
def test_failed_save_stops_all_ranks(options, culprit, pool, tmp_path):
    path = tmp_path / "last.ckpt"
    for failure in pool.failures(fit_failing, options, path, culprit, world=2):
        assert failure.kind == "CheckpointError", failure.trace
        assert f"the checkpoint {path} was not written" in failure.message
        assert "No space left on device" in failure.message
        assert path.is_file() or f"rank {culprit}: OSError" in failure.message
    (found,) = pool.run(parameters_in, {}, path, world=1)
    start = seeded(ONE).state_dict()
    assert any(not np.array_equal(value, start[name].numpy()) for name, value in found.items())


class Rated(LanguageModel):
    """Has a learning rate to be found, and momentum."""

    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def find_rate(
    rank: int, world: int, options: dict[str, Any] | None, folder: Path
) -> tuple[list[float], float]:
    case = Case(epochs=10)
    pl.seed_everything(7, verbose=False)
    model, start = Rated(case), seeded(case).state_dict()
    run = trainer_of(rank, world, case, options, default_root_dir=folder)
    finder: Any = Tuner(run).lr_find(
        model, loaders(case)[0], num_training=12, early_stop_threshold=None
    )
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value, keep=True), start[name]), name
    assert list(folder.iterdir()) == []
    return finder.results["loss"], finder.suggestion()


@pytest.mark.parametrize(
    "options", [FOLDER, *(pytest.param(x, marks=pytest.mark.full) for x in (FILE, ASYNC))], ids=str
)
def test_learning_rates_are_tried_with_parameters_in_parts(options, pool, tmp_path):
    """The search ends where it began."""
    ((losses, rate),) = pool.run(find_rate, None, tmp_path, world=1)
    for found, suggested in pool.run(find_rate, options, tmp_path, world=2):
        assert np.abs(np.array(found) - losses).max() <= 1e-5
        assert suggested == rate


class Own(CheckpointIO):
    """Of a user."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.load(path)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


def test_checkpoint_io_of_the_user():
    def used(plugin: Any) -> Any:
        run = trainer_of(0, 1, ONE, {})
        run.strategy.checkpoint_io = plugin
        return run.strategy.checkpoint_io

    own, torchs = Own(), TorchCheckpointIO()
    assert type(trainer_of(0, 1, ONE, {}).strategy.checkpoint_io) is AsideCheckpointIO
    assert used(own) is own
    assert used(torchs) is torchs
    wrapper = AsyncCheckpointIO(own)
    assert used(wrapper).checkpoint_io is own
    for wrapper in (AsyncCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())):
        inner = used(wrapper).checkpoint_io
        assert type(inner) is AsideCheckpointIO
        assert used(wrapper).checkpoint_io is inner
    nested = used(AsyncCheckpointIO(AsyncCheckpointIO()))
    assert type(nested.checkpoint_io.checkpoint_io) is AsideCheckpointIO


def test_folders_of_another_machine_are_refused(pool):
    for failure in pool.failures(fit_saving, ONE, FOLDER, "memory://a/b.ckpt", world=2):
        assert failure.kind == "ConfigError"
        assert "memory://a/b.ckpt is an address" in failure.message
