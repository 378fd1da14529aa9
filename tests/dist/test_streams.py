"""Streams of litdata, which deal their samples out by themselves: the package itself is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._harness.models import furthest
from tests._harness.streamed import CASE, stream

pytest.importorskip("litdata")
pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
MESHES = {"cp2": (2, 1), "dp2 x cp2": (4, 2)}
"""Ranks and virtual devices."""
OPTIONS = {"context_parallel_size": 2}
EPOCH, LIMIT = CASE.samples // CASE.batch, 1e-12


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    """Written by a process of its own: litdata changes the way in which others are started."""
    folder = tmp_path_factory.mktemp("chunks")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "tests._harness.streamed", folder],
        env=os.environ | {"PYTHONPATH": path, "DATA_OPTIMIZER_CACHE_FOLDER": f"{folder}/cache"},
        timeout=100,
        check=True,
    )
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_read_what_those_of_the_plain_trainer_read(mesh, workers, chunks, pool, tmp_path):
    world, devices = MESHES[mesh]
    expected = pool.run(stream, None, chunks, workers, tmp_path / "plain", None, world=devices)
    found = pool.run(stream, OPTIONS, chunks, workers, tmp_path / "own", None, world=world)
    for rank, one in enumerate(found):
        device = expected[rank * devices // world]
        assert one.ids == device.ids, f"rank {rank}"
        assert max(furthest(one, device).values()) <= LIMIT, f"rank {rank}"
    for epoch in range(CASE.epochs):
        rows = CASE.samples // devices
        read = [x for one in expected for x in one.ids[rows * epoch : rows * (epoch + 1)]]
        assert sorted(read) == list(range(CASE.samples)), "every sample once in an epoch"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_reads_what_is_left(workers, chunks, pool, tmp_path):
    """The loader knows its state; with workers litdata deals the rest out anew."""
    stop = 3
    results = {}
    for name, world, options in (("plain", 1, None), ("own", 2, OPTIONS)):
        whole = pool.run(stream, options, chunks, workers, tmp_path / name, None, world=world)
        file = tmp_path / name / f"step={stop}.ckpt"
        rest = pool.run(stream, options, chunks, workers, tmp_path / "r", file, world=world)
        results[name] = whole, rest
    ((whole,), (plain,)) = results["plain"]
    rows = (EPOCH - stop) * CASE.batch
    assert sorted(plain.ids[:rows]) == sorted(whole.ids[-rows - CASE.samples : -CASE.samples])
    for rank, found in enumerate(results["own"][1]):
        if workers:
            assert sorted(found.ids[:rows]) == sorted(plain.ids[:rows]), f"rank {rank}"
            assert found.ids == results["own"][1][0].ids
        else:
            assert found.ids == plain.ids, f"rank {rank}"
            assert max(furthest(found, plain).values()) <= LIMIT, f"rank {rank}"


@pytest.mark.parametrize("data", ["check", "broadcast"])
def test_a_stream_that_deals_to_ranks_is_refused(data, chunks, pool, tmp_path):
    options = {**OPTIONS, "data": data}
    failures = pool.failures(stream, options, chunks, 0, tmp_path, None, False, world=2)
    for rank, failure in enumerate(failures):
        assert failure.kind == "RefusedError"
        assert f"StreamingDataset gives this process share {rank} of 2" in failure.message
