"""kill -9 of a rank during a save: the newest complete checkpoint loads, the others end."""

import random

import pytest

from lightning_cp.plugin.aside import newest
from tests._harness.killed import kill_during_save, step_of
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

FILE = {"zero_stage": 3}
FOLDER = {**FILE, "save_distributed_checkpoint": True}
ASYNC = {**FILE, "save_distributed_checkpoint": "async"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("options", "points"),
    [
        (FOLDER, 2),
        (FILE, 1),
        *(pytest.param(x, 20, marks=pytest.mark.full) for x in (FOLDER, FILE, ASYNC)),
    ],
    ids=str,
)
def test_newest_complete_checkpoint_loads(options, points, tmp_path):
    """Every run goes on from what the one before left, and checks that."""
    draw, steps = random.Random(points), [0]
    for _ in range(points):
        said = kill_during_save(options, tmp_path, draw)
        assert said.partition(":")[0] in ("PeerError", "RuntimeError", "CheckpointError"), said
        path = tmp_path / "last.ckpt"
        steps.append(step_of(path))
        assert newest(path).is_dir() == ("save_distributed_checkpoint" in options)
    assert steps == sorted(set(steps)), steps
