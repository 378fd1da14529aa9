"""Names of strategies without an import of ours, and torch's import whatever Lightning is there.

Every test is a process of its own, in which the package looks as if a wheel was installed.
"""

import ast
import sys

import pytest

import _lightning_cp_autoload as autoload
from tests._harness.installed import ENTRY, ROOT, run_installed

SOURCE = ROOT / "_lightning_cp_autoload.py"
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture
def run(tmp_path):
    """Runs a program, by default with the entry point in place; gives the words it printed."""
    return lambda program, **environment: run_installed(
        tmp_path, "-c", program, **environment
    ).split()


NAMED = """
import sys
sys.modules["{other}"] = None  # as if it was not installed
from {package} import Trainer
from {package}.strategies import StrategyRegistry

options = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
assert "lightning_cp" not in sys.modules
for name in {names}:
    assert StrategyRegistry.available_strategies().count(name) == 1
    strategy = Trainer(strategy=name, **options).strategy
    assert strategy.num_processes == 2, strategy
    assert sys.modules["lightning_cp"].ContextParallelStrategy is type(strategy)
before = dict(StrategyRegistry)
import lightning_cp.plugin, _lightning_cp_autoload
_lightning_cp_autoload.register()
assert dict(StrategyRegistry) == before
assert sum(finder is _lightning_cp_autoload._Finder for finder in sys.meta_path) == 1
print(type(strategy).__module__)
"""


@pytest.mark.parametrize(
    ("package", "other", "home"),
    [
        ("lightning.pytorch", "pytorch_lightning", "lightning_cp.plugin.strategy"),
        pytest.param(
            "pytorch_lightning",
            "lightning",
            "lightning_cp.plugin.pytorch_lightning",
            marks=pytest.mark.full,
        ),
    ],
)
def test_script_without_our_import(package, other, home, run):
    program = NAMED.format(package=package, other=other, names=list(autoload.PRESETS))
    assert run(program) == [home]


def test_switched_off_and_registered_by_our_import(run):
    program = """
import torch, sys
from lightning.pytorch.strategies import StrategyRegistry
assert "_lightning_cp_autoload" not in sys.modules
print("context_parallel" in StrategyRegistry)
import lightning_cp
print("context_parallel" in StrategyRegistry)
print(StrategyRegistry.get("context_parallel").strategy_name)
"""
    found = run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found == ["False", "True", "context_parallel"]


WITHOUT = """
import sys
from importlib import import_module

class Absent:
    @staticmethod
    def find_spec(name, *where):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}")

if "{state}" == "absent":
    sys.meta_path.insert(0, Absent)
import torch
assert "_lightning_cp_autoload" in sys.modules
for package in ("lightning.pytorch", "pytorch_lightning"):
    try:
        module = import_module(package + ".strategies")
        print(module.__name__, module.__loader__.__class__.__name__)
    except Exception as error:
        print(type(error).__name__)
print(float(torch.ones(2).sum()))
"""


@pytest.mark.parametrize(
    ("state", "source", "expected"),
    [
        ("absent", "", ["ModuleNotFoundError"] * 2),
        ("broken", "raise OSError('broken')", ["OSError"] * 2),
        ("empty", "", ["lightning.pytorch.strategies", "pytorch_lightning.strategies"]),
        ("strange", "StrategyRegistry = 3", [f"{package}.strategies" for package in PACKAGES]),
    ],
)
def test_torch_is_imported_whatever_lightning_is_there(state, source, expected, run, tmp_path):
    for package in PACKAGES:
        parts = package.split(".")
        for depth in range(1, len(parts) + 1):
            folder = tmp_path.joinpath(*parts[:depth])
            folder.mkdir()
            (folder / "__init__.py").touch()
        (folder / "strategies.py").write_text(source)
    found = run(WITHOUT.replace("{state}", state))
    assert [word for word in found if word != "SourceFileLoader"] == [*expected, "2.0"]


def test_a_loaded_package_and_a_reloaded_one(run, tmp_path):
    """Registered at once where the module is there already, and again after a reload."""
    (tmp_path / "pytorch_lightning").mkdir()
    (tmp_path / "pytorch_lightning" / "__init__.py").touch()
    (tmp_path / "pytorch_lightning" / "strategies.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy, description=None, override=False, **options):\n"
        "        assert name not in self\n"
        "        self[name] = options\n"
        "StrategyRegistry = Registry()\n"
    )
    found = run(
        "import importlib\n"
        "import pytorch_lightning.strategies as module\n"
        "print(len(module.StrategyRegistry))\n"
        "import _lightning_cp_autoload as autoload\n"
        "for again in range(2):\n"
        "    autoload.register()\n"
        "    print(module.StrategyRegistry == autoload.PRESETS)\n"
        "importlib.reload(module)\n"
        "print(module.StrategyRegistry == autoload.PRESETS)\n"
    )
    assert found == ["0", "True", "True", "True"]


def test_cost(run):
    found = run(
        "import sys, time\n"
        "import _lightning_cp_autoload as autoload\n"
        "start = time.process_time()\n"
        "autoload.register()\n"
        "print(time.process_time() - start)\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'lightning_cp'}\n"
        "print(len(heavy & sys.modules.keys()))\n"
    )
    assert float(found[0]) < 5e-3
    assert found[1] == "0"


def test_source():
    text = SOURCE.read_text()
    assert text.count("\n") < 50
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
    project = (ROOT / "pyproject.toml").read_text()
    assert f'[project.entry-points."torch.backends"]\n{ENTRY}\n' in project
