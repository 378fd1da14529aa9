"""Checkpoints hold no trace of context parallelism: they move between it and one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests._harness.models import (
    Case,
    LanguageModel,
    Outcome,
    furthest,
    loaders,
    outcome,
    seeded,
    trainer_of,
)
from tests._harness.resumed import Mesh, fit_resuming, second_epoch
from tests._harness.rows import assert_same

pytestmark = pytest.mark.dist

ONE = Case(momentum=0.9)
TWO = Case(momentum=0.9, epochs=2)


MESHES = {
    "plain": Mesh(1, None),
    "cp2": Mesh(2, {}),
    "cp3": Mesh(3, {"layout": "contiguous"}),
}


def fit_saving(
    rank: int, world: int, case: Case, options: dict[str, Any] | None, folder: Path
) -> tuple[Outcome, str, float]:
    """Train, and keep the best and the last; also returns path and score of the best."""
    callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    model = seeded(case)
    trainer = trainer_of(
        rank, world, case, options, enable_checkpointing=True, callbacks=[callback]
    )
    trainer.fit(model, *loaders(case))
    assert callback.best_model_score is not None
    return outcome(trainer, model), callback.best_model_path, float(callback.best_model_score)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Folder with checkpoints of one epoch, for every mesh that is asked for."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            mesh = MESHES[name]
            pool.run(fit_saving, ONE, mesh.options, folders[name], world=mesh.world)
        return folders[name]

    return save


@pytest.fixture(scope="module")
def uninterrupted(plain):
    """The second of two epochs of the plain Trainer."""
    (found,) = plain(TWO)
    return second_epoch(found, TWO)


def test_best_and_last_are_written(pool, tmp_path):
    found = pool.run(fit_saving, TWO, {}, tmp_path, world=2)
    files = {file.name for file in tmp_path.iterdir()}
    assert "last.ckpt" in files
    assert len(files) == 2
    for one, best, score in found:
        assert Path(best).name in files
        assert score == pytest.approx(one.metrics["val_loss"])  # the second epoch is the best
        assert (best, score) == found[0][1:]
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for name, value in found[0][0].parameters.items():
        assert torch.equal(last["state_dict"][name], torch.from_numpy(value)), name
    assert (last["epoch"], last["global_step"]) == (1, 6)


def test_content_is_that_of_the_plain_trainer(saved):
    plain, cut = (
        torch.load(saved(name) / "last.ckpt", weights_only=True) for name in ("plain", "cp2")
    )
    assert cut.keys() == plain.keys()
    assert list(cut["state_dict"]) == list(plain["state_dict"]) == list(seeded(ONE).state_dict())
    (optimizer,), (expected,) = cut["optimizer_states"], plain["optimizer_states"]
    assert optimizer["state"].keys() == expected["state"].keys()
    assert optimizer["param_groups"] == expected["param_groups"]
    for name, value in plain["state_dict"].items():
        assert torch.allclose(cut["state_dict"][name], value, rtol=0, atol=1e-6), name
    for index, state in expected["state"].items():
        momentum = optimizer["state"][index]["momentum_buffer"]
        assert torch.allclose(momentum, state["momentum_buffer"], rtol=0, atol=1e-6), index


@pytest.mark.parametrize("name", ["cp2", "cp3"])
def test_loads_in_one_process(name, saved):
    file = saved(name) / "last.ckpt"
    model = LanguageModel.load_from_checkpoint(file, case=ONE)
    expected = torch.load(file, weights_only=True)["state_dict"]
    start = seeded(ONE).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
        assert not torch.equal(value, start[key]), key


@pytest.mark.parametrize(
    ("before", "after"),
    [("cp2", "cp2"), ("cp2", "plain"), ("plain", "cp2"), ("cp2", "cp3"), ("cp3", "plain")],
)
def test_resumes(before, after, saved, uninterrupted, pool):
    mesh = MESHES[after]
    file = saved(before) / "last.ckpt"
    for found in pool.run(fit_resuming, TWO, mesh.options, file, world=mesh.world):
        assert_same(found, uninterrupted, 1e-6)


def test_momentum_matters(saved, uninterrupted, pool, tmp_path):
    """Without the state of the optimizer the same test would fail."""
    content = torch.load(saved("plain") / "last.ckpt", weights_only=True)
    for state in content["optimizer_states"][0]["state"].values():
        state["momentum_buffer"].zero_()
    torch.save(content, tmp_path / "without.ckpt")
    (found,) = pool.run(fit_resuming, TWO, None, tmp_path / "without.ckpt", world=1)
    assert furthest(found, uninterrupted)["parameters"] > 1e-3
