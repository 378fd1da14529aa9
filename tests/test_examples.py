import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "examples" / "existing_project.py"
TIMEOUT = 110
"""Seconds; a hang would last for the half hour of the process group's timeout."""

# As if the decoder had been written with positions counted from the local length.
COUNTING = f"""\
import sys

import torch

sys.path.insert(0, {str(PROJECT.parent)!r})
import existing_project


class Decoder(existing_project.Decoder):
    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, torch.arange(input_ids.shape[1]))


if __name__ == "__main__":
    existing_project.Decoder = Decoder
    existing_project.main()
"""


def run(script, strategy, devices, folder, *, launcher=(), more=None):
    return subprocess.run(
        [sys.executable, *launcher, script, "--strategy", strategy, "--devices", str(devices)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (more or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def final_loss(result):
    assert result.returncode == 0, result.stderr[-4000:]
    found = re.findall(r"^final loss (\S+)$", result.stdout, re.MULTILINE)
    assert len(found) == 1, result.stdout
    return float(found[0])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return final_loss(run(PROJECT, "auto", 1, tmp_path_factory.mktemp("auto")))


@pytest.mark.full  # a stage of .ci/run trains it, without the comparison
@pytest.mark.dist
def test_existing_project_has_the_same_loss(one_process, tmp_path):
    found = final_loss(run(PROJECT, "context_parallel", 2, tmp_path))
    assert found == pytest.approx(one_process, rel=1e-5)
    assert one_process < 4
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.dist
def test_torchrun_starts_the_ranks(one_process, tmp_path):
    """One process prints; which of them starts the others is up to torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = final_loss(run(PROJECT, "context_parallel", 2, tmp_path, launcher=launcher))
    assert found == pytest.approx(one_process, rel=1e-5)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


@pytest.mark.full
@pytest.mark.dist
def test_slurm_starts_the_ranks(one_process, tmp_path):
    """Two processes with what srun would have set."""
    common = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost"}
    common |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    common |= {"SLURM_NODEID": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    with ThreadPoolExecutor(2) as tasks:
        ranks = [{"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
        first, second = tasks.map(
            lambda own: run(PROJECT, "context_parallel", 2, tmp_path, more=common | own), ranks
        )
    assert final_loss(first) == pytest.approx(one_process, rel=1e-5)
    assert second.returncode == 0, second.stderr[-4000:]
    assert "final loss" not in second.stdout


@pytest.mark.full
def test_counted_positions_are_right_in_one_process(one_process, tmp_path):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    assert final_loss(run(script, "auto", 1, tmp_path)) == one_process


@pytest.mark.full
@pytest.mark.dist
def test_counted_positions_are_refused(tmp_path):
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    result = run(script, "context_parallel", 2, tmp_path)
    assert result.returncode != 0
    assert "RefusedError: module 'decoder'" in result.stderr
    assert "functional.positions(256)" in result.stderr
    assert "final loss" not in result.stdout
