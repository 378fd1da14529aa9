"""Sharded parameters: whole runs equal those of the plain Trainer, and so do their checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

from tests._harness.grid import named
from tests._harness.models import Case, LanguageModel, Outcome, loaders, outcome, seeded, trainer_of
from tests._harness.pool import Pool
from tests._harness.resumed import Mesh, fit_resuming, moved, second_epoch
from tests._harness.rows import TOGETHER, TRAINING, Row, assert_same, check, trainer
from tests._harness.sharded import SHARDED, needs_sharding
from tests.dist.test_parity import BATCHES, GRID

pytestmark = [pytest.mark.dist, needs_sharding]

ROWS = [
    Row("ring-zigzag-W2", Case(), {"exchange": "ring", "layout": "zigzag"}),
    Row("ring-zigzag-W3", Case(), {"exchange": "ring", "layout": "zigzag"}, cp=3),
    Row("allgather-contiguous", Case(), {"exchange": "allgather", "layout": "contiguous"}),
    Row("dp2-cp1", Case(samples=12), {}, 2, 1),
    Row("dp2-cp2", Case(samples=12, momentum=0.9), {}, 2, 2),
    Row("momentum", Case(momentum=0.9, epochs=2), {}),
    Row("clip-norm", Case(trainer=trainer(gradient_clip_val=0.1)), {}, cp=3),
    Row("labels-on-one-rank", Case(valid="front"), {}, cp=3),
    Row("padding-both", Case(padding=("left", "right")), {"layout": "contiguous"}, cp=3),
    Row("root-only", Case(), {"auto_wrap_policy": ()}),
    Row("root-only-manual", Case(optimisation="manual"), {"auto_wrap_policy": ()}),
]


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_training(row, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=3)


@pytest.mark.full
@pytest.mark.parametrize("row", [*TRAINING, *TOGETHER], ids=named)
def test_several_at_once(row, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=3)


@pytest.mark.full
@pytest.mark.parametrize("row", [*GRID, *BATCHES], ids=named)
def test_rows_of_replicated_parameters(row, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=3)


@pytest.mark.parametrize("row", ROWS[:2], ids=named)
def test_training_in_single_precision(row, pool, plain):
    check(row, pool, plain, "32-true", zero_stage=3)


ONE, TWO = Case(samples=12, momentum=0.9), Case(samples=12, momentum=0.9, epochs=2)
MESHES = {
    "plain1": Mesh(1, None),
    "cp2": Mesh(2, SHARDED),
    "cp3": Mesh(3, SHARDED),
    "plain2": Mesh(2, None),
    "dp2": Mesh(2, {**SHARDED, "context_parallel_size": 1}),
    "dp2cp2": Mesh(4, {**SHARDED, "context_parallel_size": 2}),
    "replicated": Mesh(2, {}),
    "one": Mesh(1, {}),
}
FOLDER = {"save_distributed_checkpoint": True}


def fit_saving(
    rank: int, world: int, options: dict[str, Any] | None, folder: Path
) -> tuple[Outcome, list[str]]:
    """One epoch with checkpoints; what the callback kept, and one file of the Trainer's own."""
    callback = ModelCheckpoint(folder, filename="best", monitor="val_loss")
    model = seeded(ONE)
    run = trainer_of(rank, world, ONE, options, enable_checkpointing=True, callbacks=[callback])
    run.fit(model, *loaders(ONE))
    run.save_checkpoint(folder / "after.ckpt")
    found = outcome(run, model)
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return found, sorted(x.name for x in folder.iterdir())


def evaluate_file(
    rank: int, world: int, options: dict[str, Any] | None, path: Path
) -> dict[str, float]:
    model = moved(replace(ONE, momentum=0.0))
    run = trainer_of(rank, world, ONE, options)
    run.validate(model, loaders(ONE)[1], ckpt_path=path, verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Folder and outcome of an epoch on a mesh."""
    found: dict[tuple[str, bool], tuple[Path, Outcome]] = {}

    def save(name: str, distributed: bool = False) -> tuple[Path, Outcome]:
        if (name, distributed) not in found:
            path = tmp_path_factory.mktemp(name)
            world, options = MESHES[name]
            if options is not None and distributed:
                options = {**options, **FOLDER}
            results = pool.run(fit_saving, options, path, world=world)
            for _, files in results:
                assert {"after.ckpt", "best.ckpt", "weights.ckpt"} <= set(files)
            found[name, distributed] = path, results[0][0]
        return found[name, distributed]

    return save


@pytest.fixture(scope="module")
def uninterrupted(plain):
    """The second of two epochs of the plain Trainer on one or two devices."""

    def second(name: str, rank: int) -> Outcome:
        dp = 2 if name in ("plain2", "dp2", "dp2cp2") else 1
        one = plain(TWO, dp)[rank * dp // MESHES[name].world]
        return second_epoch(one, TWO)

    return second


def test_file_is_that_of_the_plain_trainer(saved):
    (plain, _), (cut, found) = saved("plain1"), saved("cp2")
    for file in ("after.ckpt", "best.ckpt"):
        one, other = (torch.load(path / file, weights_only=True) for path in (plain, cut))
        assert one.keys() == other.keys()
        assert list(one["state_dict"]) == list(other["state_dict"])
        for name, value in one["state_dict"].items():
            assert type(other["state_dict"][name]) is torch.Tensor
            assert torch.equal(other["state_dict"][name], torch.from_numpy(found.parameters[name]))
            assert torch.allclose(other["state_dict"][name], value, rtol=0, atol=1e-6), name
        (expected,), (states,) = one["optimizer_states"], other["optimizer_states"]
        assert states["param_groups"] == expected["param_groups"]
        for index, state in expected["state"].items():
            momentum = states["state"][index]["momentum_buffer"]
            assert torch.allclose(momentum, state["momentum_buffer"], rtol=0, atol=1e-6), index
    weights = torch.load(cut / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in weights


def test_file_loads_in_one_process(saved):
    path, found = saved("cp2")
    model = LanguageModel.load_from_checkpoint(path / "after.ckpt", case=ONE)
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), found.parameters[name]), name


def check_resumed(name: str, file: Path, uninterrupted: Any, pool: Pool, **more: Any) -> None:
    world, options = MESHES[name]
    options = None if options is None else {**options, **more}
    for rank, found in enumerate(pool.run(fit_resuming, TWO, options, file, world=world)):
        assert_same(found, uninterrupted(name, rank), 1e-6, where=f"rank {rank}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cp2", "cp2"),
        pytest.param("cp2", "plain1", marks=pytest.mark.full),
        ("plain1", "cp3"),
        pytest.param("cp3", "replicated", marks=pytest.mark.full),
        pytest.param("replicated", "cp2", marks=pytest.mark.full),
        pytest.param("dp2", "dp2cp2", marks=pytest.mark.full),
        ("dp2cp2", "plain2"),
    ],
)
def test_file_resumes(before, after, saved, uninterrupted, pool):
    check_resumed(after, saved(before)[0] / "best.ckpt", uninterrupted, pool)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("cp2", "cp2", marks=pytest.mark.full),
        ("cp2", "cp3"),
        pytest.param("dp2", "dp2cp2", marks=pytest.mark.full),
        ("dp2cp2", "dp2"),
        pytest.param("cp3", "replicated", marks=pytest.mark.full),
        ("cp2", "one"),
    ],
)
def test_folder_resumes(before, after, saved, uninterrupted, pool):
    file = saved(before, distributed=True)[0] / "best.ckpt"
    assert file.is_dir()
    check_resumed(after, file, uninterrupted, pool)
    if after == "cp3":
        check_resumed(after, file, uninterrupted, pool, **FOLDER)


def test_folder_becomes_a_file(saved, uninterrupted, pool, tmp_path):
    """With Lightning's own tool, for the plain Trainer."""
    path, found = saved("cp2", distributed=True)
    content = _format_checkpoint(_load_distributed_checkpoint(path / "after.ckpt"))
    for name, value in content["state_dict"].items():
        assert np.array_equal(value.numpy(), found.parameters[name]), name
    torch.save(content, tmp_path / "one.ckpt")
    check_resumed("plain1", tmp_path / "one.ckpt", uninterrupted, pool)


@pytest.mark.parametrize("distributed", [False, True])
def test_checkpoint_is_evaluated(distributed, saved, pool):
    file = saved("cp2", distributed)[0] / "weights.ckpt"
    (expected,) = pool.run(evaluate_file, None, saved("plain1")[0] / "after.ckpt", world=1)
    for found in pool.run(evaluate_file, SHARDED, file, world=3):
        assert found == pytest.approx(expected, rel=1e-6)
