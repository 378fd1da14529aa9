"""Who starts the ranks of a run: Python's multiprocessing, a notebook, a process on every node."""

import json
import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_cp import ContextParallelStrategy
from lightning_cp.errors import ConfigError
from tests._harness.launched import PATIENCE, left_by, plain, start
from tests._harness.models import furthest
from tests._harness.sharded import needs_sharding

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-12


def environment(**variables):
    """Of a process that finds this package and the tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables


def trainer_with(**options):
    strategy = ContextParallelStrategy(**options)
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False
    )


@pytest.fixture(scope="module")
def one_device(pool):
    return plain(pool, 1)


@pytest.mark.parametrize(
    ("method", "stage"),
    [
        ("fork", 0),
        pytest.param("fork", 3, marks=needs_sharding),
        pytest.param("spawn", 3, marks=[needs_sharding, pytest.mark.full]),
    ],
)
def test_parameters_come_back_to_the_process_that_started_the_ranks(
    method, stage, one_device, tmp_path
):
    left = start(tmp_path, {"devices": 2}, {"start_method": method, "zero_stage": stage})
    assert left.outcome.ids == [], "the module itself is trained in other processes"
    (expected,) = one_device
    found = left.outcome._replace(step_losses=expected.step_losses)
    off = furthest(found, expected)
    assert max(off.values()) <= LIMIT, off
    assert found.metrics.keys() == expected.metrics.keys()
    assert left.scores["val_loss"] == pytest.approx(expected.metrics["val_loss"], rel=LIMIT)


def test_processes_that_exist_start_no_others(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="LightningEnvironment says that they have been started"):
        trainer_with(start_method="fork")
    assert not trainer_with().strategy.launcher.is_interactive_compatible


def test_a_notebook_forks(monkeypatch):
    monkeypatch.setattr(ContextParallelStrategy._flavor, "interactive", True)
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert trainer_with().strategy.launcher._start_method == "fork"
    for method in ("popen", "spawn"):
        with pytest.raises(MisconfigurationException, match="not compatible with an interactive"):
            trainer_with(start_method=method)


def test_start_methods_have_names():
    with pytest.raises(ConfigError, match="start_method='thread' is unknown; use one of auto, pop"):
        ContextParallelStrategy(start_method="thread")


CELLS = [
    f"""\
import pickle, sys
sys.path[:0] = [{str(ROOT / "examples")!r}]
import lightning as L
import torch
from torch.utils.data import DataLoader
from existing_project import LanguageModel, Text
""",
    """\
class Noted(LanguageModel):
    def on_train_start(self):
        print("steps on", self.trainer.world_size)
""",
    """\
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu", devices={devices}, strategy={strategy!r}, max_steps=4, precision="64-true",
    logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
model = Noted().double()
trainer.fit(model, DataLoader(Text(), batch_size=2, shuffle=True))
""",
    """\
with open({file!r}, "wb") as file:
    pickle.dump((float(trainer.callback_metrics["loss"]), model.state_dict()), file)
""",
]
SHELLS = {
    "python": "{whole}",
    "IPython": """\
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell).raise_error()
""",
}
"""Python's own prompt, and the shell below notebooks."""


def in_shell(shell, folder, strategy, devices):
    """Loss and parameters in a session, and what it printed."""
    file = folder / f"{strategy}.pkl"
    given = {"strategy": strategy, "devices": devices, "file": str(file)}
    cells = [CELLS[0], CELLS[1], *(cell.format(**given) for cell in CELLS[2:])]
    program = SHELLS[shell].format(whole="\n".join(cells), cells=cells)
    option = ["-i"] if shell == "python" else []
    result = subprocess.run(
        [sys.executable, *option, "-c", program],
        env=environment(IPYTHONDIR=str(folder)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert file.exists(), result.stderr[-4000:]
    return pickle.loads(file.read_bytes()), result.stdout


@pytest.mark.full
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize("shell", SHELLS)
def test_notebook(shell, tmp_path):
    """A module that is defined in a cell, trained by two processes that the session forks."""
    if shell != "python":
        pytest.importorskip(shell)
    (expected, parameters), _ = in_shell("python", tmp_path, "auto", 1)
    (loss, found), printed = in_shell(shell, tmp_path, "context_parallel", 2)
    assert printed.count("steps on 2") == 2
    assert loss == pytest.approx(expected, rel=LIMIT)
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert (found[name] - value).abs().max() <= LIMIT, name


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def by_hand(node, port, devices):
    """A user's shell on every host; the Trainer starts the other processes of a node."""
    return [], {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": str(node)}


def by_torchrun(node, port, devices):
    where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "localhost"]
    where += ["--master-port", port, "--nproc-per-node", str(devices)]
    return ["-m", "torch.distributed.run", *where], {}


@pytest.mark.full
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.parametrize(
    ("start", "devices", "stage"),
    [(by_hand, 1, 0), (by_hand, 2, 3), (by_torchrun, 1, 3), (by_torchrun, 2, 0)],
)
def test_two_nodes(start, devices, stage, one_device, pool, tmp_path):
    """One device of two nodes, or two of which each is a node; both are processes of this host."""
    strategy = {"context_parallel_size": 2, "zero_stage": stage}
    options = [json.dumps({"devices": devices, "num_nodes": 2}), json.dumps(strategy)]
    port = free_port()

    def node(number):
        launcher, variables = start(number, port, devices)
        return subprocess.run(
            [sys.executable, *launcher, "-m", "tests._harness.launched", tmp_path, *options],
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(node, range(2))
    for result in (first, second):
        assert result.returncode == 0, result.stderr[-4000:]
        spans = "a context-parallel group of 2 ranks spans nodes of 1" in result.stderr
        assert spans == (devices == 1)
    expected = one_device if devices == 1 else plain(pool, 2)
    found = left_by(tmp_path)
    assert sorted(found) == list(range(2 * devices))
    for rank, left in found.items():
        own = expected[rank // 2]
        off = furthest(left.outcome, own)
        assert max(off.values()) <= LIMIT, f"rank {rank}: {off}"
        assert left.outcome.ids == own.ids, f"rank {rank}"
        assert left.outcome.counts == own.counts, f"rank {rank}"
