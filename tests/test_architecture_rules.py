"""No rule of `tests/_harness/rules.py` passes because it is blind, or refuses what is right."""

import pytest

from tests._harness.rules import (
    RULES,
    Rule,
    ascii_only,
    assert_invariants,
    coded_ignores,
    distributed_below_comm,
    docstrings,
    few_parameters,
    lightning_on_top,
    no_environment,
    no_globals,
    no_swallowing,
    no_todos,
    parse,
    short_file,
    short_functions,
)

CLEAN = '"""A module."""\n'
ELSEWHERE = "loss.py"

# rule: [(path, source that breaks it), ...], [(path, source that keeps it), ...]
EXAMPLES: dict[Rule, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    short_file: (
        [(ELSEWHERE, "x = 0\n" * 401)],
        [(ELSEWHERE, "x = 0\n" * 400)],
    ),
    short_functions: (
        [
            (ELSEWHERE, "def f():\n" + "    x = 0\n" * 60),
            (ELSEWHERE, "class A:\n    async def f(self):\n" + "        x = 0\n" * 60),
        ],
        [(ELSEWHERE, "def f():\n" + "    x = 0\n" * 59)],
    ),
    few_parameters: (
        [
            (ELSEWHERE, "def f(a, b, c, d, e, f, g, h, i): ..."),
            (ELSEWHERE, "class A:\n    def f(self, a, b, c, d, *, e, f, g, h, i): ..."),
            (ELSEWHERE, "class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h, i): ..."),
        ],
        [
            (ELSEWHERE, "class A:\n    def f(self, a, b, c, d, *, e, f, g, h): ..."),
            (ELSEWHERE, "class A:\n    @override\n    def f(self, a, b, c, d, e, f, g, h, i): ..."),
            (
                "plugin/base.py",
                "class ContextParallelBase:\n"
                "    def __init__(self, a, b, c, d, e, f, g, h, i): ...",
            ),
        ],
    ),
    docstrings: (
        [
            (ELSEWHERE, "x = 0\n"),
            (ELSEWHERE, CLEAN + "def f(): ...\n"),
            (ELSEWHERE, CLEAN + "class A: ...\n"),
            (ELSEWHERE, CLEAN + 'class A:\n    """A."""\n    def f(self): ...\n'),
            (ELSEWHERE, CLEAN + 'class A(Protocol):\n    """A."""\n    def f(self): return 0\n'),
        ],
        [
            (ELSEWHERE, ""),
            (ELSEWHERE, CLEAN + 'def f():\n    """Do."""\n    def inner(): ...\n'),
            (ELSEWHERE, CLEAN + "def _f(): ...\nclass _A:\n    def f(self): ...\n"),
            (ELSEWHERE, CLEAN + 'class A:\n    """A."""\n    def __len__(self): ...\n'),
            (ELSEWHERE, CLEAN + 'class A:\n    """A."""\n    @override\n    def f(self): ...\n'),
            (ELSEWHERE, CLEAN + 'class A(Protocol):\n    """A."""\n    def f(self): ...\n'),
        ],
    ),
    no_globals: (
        [(ELSEWHERE, "def f():\n    global x\n    x = 0\n")],
        [(ELSEWHERE, "def f():\n    x = 0\n    def g():\n        nonlocal x\n        x = 1\n")],
    ),
    no_environment: (
        [
            (ELSEWHERE, "import os\nx = os.environ['A']\n"),
            (ELSEWHERE, "import os\nx = os.getenv('A')\n"),
            (ELSEWHERE, "from os import environ\n"),
        ],
        [
            ("cli/main.py", "import os\nx = os.environ['A']\n"),
            (ELSEWHERE, "import os\nos.getpid()\n"),
        ],
    ),
    assert_invariants: (
        [
            (ELSEWHERE, "assert x\n"),
            (ELSEWHERE, "# checked above\nassert x  # never None\n"),
            (ELSEWHERE, "# invariant: far away\n\nassert x\n"),
            (ELSEWHERE, "assert '# invariant: a string'\n"),
        ],
        [
            (ELSEWHERE, "assert x  # invariant: set by the caller\n"),
            (ELSEWHERE, "# invariant: set by the caller\nassert x\n"),
            (ELSEWHERE, "assert (\n    x  # invariant: set by the caller\n)\n"),
        ],
    ),
    no_swallowing: (
        [
            (ELSEWHERE, "try:\n    f()\nexcept Exception:\n    pass\n"),
            (
                ELSEWHERE,
                "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    g(error)\n",
            ),
            (ELSEWHERE, "try:\n    f()\nexcept:\n    pass\n"),
        ],
        [
            (ELSEWHERE, "try:\n    f()\nexcept Exception:\n    g()\n    raise\n"),
            (ELSEWHERE, "try:\n    f()\nexcept Exception as error:\n    raise A('b') from error\n"),
            (ELSEWHERE, "try:\n    f()\nexcept ValueError:\n    pass\n"),
        ],
    ),
    distributed_below_comm: (
        [
            (ELSEWHERE, "import torch.distributed as dist\n"),
            (ELSEWHERE, "from torch import distributed\n"),
            (ELSEWHERE, "from torch.distributed.tensor import DTensor\n"),
            (ELSEWHERE, "import torch\ntorch.distributed.barrier()\n"),
            ("diagnostics/audit.py", "import torch.distributed\n"),
            ("common.py", "import torch.distributed\n"),
        ],
        [
            ("comm/p2p.py", "import torch.distributed as dist\n"),
            ("mesh.py", "from torch.distributed import ProcessGroup\n"),
            ("diagnostics/trace.py", "import torch.distributed\n"),
            (ELSEWHERE, "import torch\ntorch.distributions.Normal\n"),
        ],
    ),
    lightning_on_top: (
        [
            (ELSEWHERE, "import lightning as L\n"),
            (ELSEWHERE, "from lightning.pytorch import Trainer\n"),
            (ELSEWHERE, "def f():\n    import pytorch_lightning\n"),
        ],
        [
            ("plugin/strategy.py", "from lightning.pytorch import Trainer\n"),
            (ELSEWHERE, "from lightning_cp.errors import ConfigError\n"),
        ],
    ),
    coded_ignores: (
        [(ELSEWHERE, "x = f()  # type: ignore\n"), (ELSEWHERE, "x = f()  #type:ignore  # why\n")],
        [(ELSEWHERE, "x = f()  # type: ignore[attr-defined]\n")],
    ),
    no_todos: (
        [(ELSEWHERE, "x = 0  # TODO: later\n"), (ELSEWHERE, '"""FIXME"""\n')],
        [(ELSEWHERE, "TODOS = 0\n")],
    ),
    ascii_only: (
        [(ELSEWHERE, "x = '\u2192'\n"), (ELSEWHERE, "# caf\u00e9\n")],
        [(ELSEWHERE, "x = '->'\n")],
    ),
}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *example) for rule in RULES for example in EXAMPLES[rule][0]],
)
def test_rule_sees_violation(rule, path, text):
    assert list(rule(parse(path, text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *example) for rule in RULES for example in EXAMPLES[rule][1]],
)
def test_rule_accepts(rule, path, text):
    assert not list(rule(parse(path, text)))
