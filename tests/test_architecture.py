"""The rules that no linter knows: sizes, docstrings, who may import and read what.

A rule takes one source file and yields `(line, message)` for every violation. `EXAMPLES` holds for
each rule a source that breaks it and one that keeps it, so that no rule passes because it is blind.
"""

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cp"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_PUBLIC_NAMES = 12

# Functions with more parameters, each with its reason.
MANY_PARAMETERS = {
    "ContextParallelBase.__init__",  # the user's options: all of them keyword-only and optional
}
# fsdp is nothing but a use of torch.distributed.fsdp.
MAY_USE_DISTRIBUTED = ("compat", "mesh", "comm", "fsdp", "plugin", "cli", "diagnostics/trace")
MAY_USE_LIGHTNING = ("plugin", "cli")
MAY_READ_ENVIRONMENT = ("plugin", "cli")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef
Found = Iterator[tuple[int, str]]


class Source(NamedTuple):
    """One file: its path within the package, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module


class Scope(NamedTuple):
    """A definition outside function bodies, with its dotted name and the class around it."""

    name: str
    node: Definition
    parent: ast.ClassDef | None


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


def lives_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path == f"{place}.py" or path.startswith(f"{place}/") for place in places)


def definitions(body: list[ast.stmt], prefix: str = "", parent: ast.ClassDef | None = None):
    for node in body:
        if isinstance(node, Definition):
            name = f"{prefix}{node.name}"
            yield Scope(name, node, parent)
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{name}.", node)


def last_name(node: ast.expr) -> str:
    """`b` of `b`, `a.b`, `a.b(...)` and `a.b[...]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def decorated(node: Definition, *names: str) -> bool:
    return any(last_name(decorator) in names for decorator in node.decorator_list)


def imported(tree: ast.Module) -> Found:
    """Line and dotted name of everything imported, and of every use of `torch.distributed`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def short_file(source: Source) -> Found:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines; a file has at most {MAX_FILE_LINES}: split it by what it is about"


def short_functions(source: Source) -> Found:
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {lines} lines; a function has at most {MAX_FUNCTION_LINES}",
                )


def few_parameters(source: Source) -> Found:
    for scope in definitions(source.tree.body):
        if not isinstance(scope.node, FunctionNode) or decorated(scope.node, "override"):
            continue
        args = scope.node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        count = sum(name not in ("self", "cls") for name in names)
        if count > MAX_PARAMETERS and scope.name not in MANY_PARAMETERS:
            yield (
                scope.node.lineno,
                f"{scope.name} takes {count} parameters, at most {MAX_PARAMETERS}: "
                f"pass a value that holds several of them",
            )


def docstrings(source: Source) -> Found:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"
    for name, node, parent in definitions(source.tree.body):
        private = any(part.startswith("_") for part in name.split("."))
        inherited = decorated(node, "override", "overload", "setter")
        protocol = parent is not None and any(last_name(b) == "Protocol" for b in parent.bases)
        stub = protocol and isinstance(node, FunctionNode) and ast.unparse(node.body[-1]) == "..."
        if not (private or inherited or stub or ast.get_docstring(node)):
            yield node.lineno, f"{name} is public and has no docstring"


def no_globals(source: Source) -> Found:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield (
                node.lineno,
                f"`global {', '.join(node.names)}`: pass the value, or give it an owner",
            )


def no_environment(source: Source) -> Found:
    if lives_in(source.path, MAY_READ_ENVIRONMENT):
        return
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv")
    uses = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
    ]
    for line, name in (*imported(source.tree), *uses):
        if name in names:
            yield line, f"{name} outside {' and '.join(MAY_READ_ENVIRONMENT)}: take an argument"


def assert_invariants(source: Source) -> Found:
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            near = range(node.lineno - 1, (node.end_lineno or node.lineno) + 1)
            if not any(comments.get(line, "").startswith("invariant:") for line in near):
                yield (
                    node.lineno,
                    "assert without a comment `# invariant: ...` on its line or the line before; "
                    "what a user can cause is an exception of errors.py",
                )


def no_swallowing(source: Source) -> Found:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(
            kind is None or last_name(kind) in ("Exception", "BaseException") for kind in kinds
        )
        raises = any(isinstance(inner, ast.Raise) for stmt in node.body for inner in ast.walk(stmt))
        if broad and not raises:
            yield (
                node.lineno,
                "a broad `except` that does not raise hides faults: name the exception",
            )


def distributed_below_comm(source: Source) -> Found:
    if lives_in(source.path, MAY_USE_DISTRIBUTED):
        return
    for line, name in imported(source.tree):
        if f"{name}.".startswith("torch.distributed."):
            yield line, f"torch.distributed outside {', '.join(MAY_USE_DISTRIBUTED)}"


def lightning_on_top(source: Source) -> Found:
    if lives_in(source.path, MAY_USE_LIGHTNING):
        return
    for line, name in imported(source.tree):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            yield line, f"{name} imported outside {' and '.join(MAY_USE_LIGHTNING)}"


def coded_ignores(source: Source) -> Found:
    for line, text in enumerate(source.text.splitlines(), 1):
        if re.search(r"#\s*type:\s*ignore(?!\[)", text):
            yield line, "`type: ignore` without a code: write `type: ignore[code]`"


def no_todos(source: Source) -> Found:
    for line, text in enumerate(source.text.splitlines(), 1):
        for word in re.findall(r"\b(?:TODO|FIXME|XXX)\b", text):
            yield line, f"{word}: do it now, or file an issue"


def ascii_only(source: Source) -> Found:
    for line, text in enumerate(source.text.splitlines(), 1):
        if not text.isascii():
            odd = next(char for char in text if not char.isascii())
            yield line, f"U+{ord(odd):04X} is not ASCII: spell it out"


Rule = Callable[[Source], Found]
CLEAN = '"""A module."""\n'
ELSEWHERE = "loss.py"

# rule: (path, source that breaks it), (path, source that keeps it), ...
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
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("rule", [short_file, short_functions], ids=lambda rule: rule.__name__)
def test_harness_keeps_rule(rule):
    found = [
        f"tests/_harness/{file.name}:{line}: {message}"
        for file in sorted((ROOT / "tests" / "_harness").rglob("*.py"))
        for line, message in rule(parse(file.name, file.read_text(encoding="utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule):
    found = [
        f"lightning_cp/{path}:{line}: {message}"
        for path, file in FILES.items()
        for line, message in rule(parse(path, file.read_text(encoding="utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *example) for rule, (bad, _) in EXAMPLES.items() for example in bad],
)
def test_rule_sees_violation(rule, path, text):
    assert list(rule(parse(path, text)))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *example) for rule, (_, good) in EXAMPLES.items() for example in good],
)
def test_rule_accepts(rule, path, text):
    assert not list(rule(parse(path, text)))


def surface(module: ModuleType) -> list[str]:
    """What is wrong with `__all__`: submodules count as public only where it names them."""
    listed = list(module.__all__)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    found = []
    if listed != sorted(set(listed)):
        found.append(f"__all__ is not sorted, or names something twice: {listed}")
    if len(listed) > MAX_PUBLIC_NAMES:
        found.append(f"__all__ has {len(listed)} names; at most {MAX_PUBLIC_NAMES} are public")
    if missing := [name for name in listed if not hasattr(module, name)]:
        found.append(f"__all__ names what does not exist: {missing}")
    if unlisted := sorted(public - set(listed)):
        found.append(f"public, but not in __all__: {unlisted}")
    return found


def test_public_names():
    import lightning_cp

    assert surface(lightning_cp) == []


@pytest.mark.parametrize(
    ("names", "listed", "wrong"),
    [
        (["A", "b"], ["A", "b"], ""),
        (["A", "_b"], ["A"], ""),
        (["A", "b"], ["b", "A"], "not sorted"),
        (["A"], ["A", "A"], "twice"),
        (["A"], ["A", "b"], "does not exist"),
        (["A", "b"], ["A"], "not in __all__"),
        ([f"a{i:02}" for i in range(13)], [f"a{i:02}" for i in range(13)], "at most 12"),
    ],
)
def test_public_names_rule(names, listed, wrong):
    module = ModuleType("package")
    vars(module).update(dict.fromkeys(names, 0), __all__=listed, sys=sys)
    found = surface(module)
    assert (wrong in found[0]) if wrong else not found


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("lint-imports", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("import-linter is not installed")
    command = [program, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_arrows():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("spans.py", "import lightning_cp.mask\n", "lightning_cp.spans is not allowed to import"),
        ("mask.py", "import lightning_cp.layout\n", "lightning_cp.mask is not allowed to import"),
        ("unplaced.py", "", "unplaced"),
    ],
)
def test_arrows_see_violation(tmp_path, file, text, message):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / PACKAGE.name / file).open("a") as target:
        target.write(text)
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert message in " ".join(result.stdout.split())
