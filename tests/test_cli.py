"""LightningCLI: the strategy by name, as a class with options, and changed on the command line."""

import json
import re

import pytest

from lightning_cp.config import Config
from tests._harness.installed import ROOT, run_installed

FILES = ROOT / "tests" / "cli"

PARSED = """
import json, sys
from dataclasses import asdict
from lightning.pytorch.cli import LightningCLI

sys.path.insert(0, {files!r})
for line in {lines!r}:
    file, *rest = line.split()
    args = ["--config", {files!r} + "/" + file, *rest]
    try:
        cli = LightningCLI(save_config_callback=None, run=False, args=args)
    except SystemExit as error:
        print("FOUND", json.dumps(None))
        continue
    it = cli.trainer.strategy
    options = dict(asdict(it._config), cp=it._cp_size, timeout=it._timeout.total_seconds())
    print("FOUND", json.dumps(options))
"""
LINES = {
    "by_name.yaml": {},
    "by_name.yaml --trainer.strategy=context_parallel_zero3": {"zero_stage": 3},
    "by_class.yaml": {
        "cp": 2,
        "layout": "contiguous",
        "exchange": "allgather",
        "sequence_dims": {"input_ids": 1},
        "timeout": 300.0,
    },
    "overridden.yaml": {},
    "overridden.yaml --trainer.strategy.context_parallel_size=2 --trainer.strategy.verify=off": {
        "cp": 2
    },
    "by_class.yaml --trainer.strategy.layout=spiral": None,
    "by_class.yaml --trainer.strategy.context_parallel_size=two": None,
    "by_class.yaml --trainer.strategy.unknown=1": None,
}
"""Of files and arguments, the options that are not the default ones; None: refused."""


def test_options_arrive(tmp_path):
    program = PARSED.format(files=str(FILES), lines=list(LINES))
    printed = run_installed(tmp_path, "-c", program)
    found = [json.loads(line) for line in re.findall(r"^FOUND (.*)$", printed, re.MULTILINE)]
    default = vars(Config()) | {"cp": "auto", "timeout": 1800.0}
    expected = [None if changed is None else default | changed for changed in LINES.values()]
    assert dict(zip(LINES, found, strict=True)) == dict(zip(LINES, expected, strict=True))


def fit(folder, file, *arguments, package="lightning.pytorch"):
    """Losses of all steps, and the number and size of groups."""
    command = [str(FILES / "tiny.py"), "fit", "--config", str(FILES / file), *arguments]
    printed = run_installed(folder, *command, TINY_PACKAGE=package)
    groups = re.findall(r"^groups (\d+) (\d+)$", printed, re.MULTILINE)
    return [float(x) for x in re.findall(r"^loss (\S+)$", printed, re.MULTILINE)], groups


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    arguments = ("--trainer.strategy=auto", "--trainer.devices=1")
    losses, _ = fit(tmp_path_factory.mktemp("plain"), "by_name.yaml", *arguments)
    assert len(losses) == 3
    return losses


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("package", "file", "arguments"),
    [
        pytest.param("lightning.pytorch", "by_name.yaml", [], id="by-name"),
        pytest.param(
            "pytorch_lightning",
            "overridden.yaml",
            [
                "--trainer.devices=2",
                "--model.counting=false",
                "--trainer.strategy.context_parallel_size=2",
            ],
            id="by-class-of-pytorch_lightning",
        ),
    ],
)
def test_fit(package, file, arguments, plain, tmp_path):
    losses, groups = fit(tmp_path, file, *arguments, package=package)
    assert groups == [("1", "2")]
    assert losses == pytest.approx(plain, rel=1e-5)
