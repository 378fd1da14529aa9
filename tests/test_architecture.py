"""The package keeps the rules that no linter knows, its public names and its arrows."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests._harness.rules import RULES, parse, short_file, short_functions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cp"
MAX_PUBLIC_NAMES = 12
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("rule", [short_file, short_functions], ids=lambda rule: rule.__name__)
def test_harness_keeps_rule(rule):
    found = [
        f"tests/_harness/{file.name}:{line}: {message}"
        for file in sorted((ROOT / "tests" / "_harness").rglob("*.py"))
        for line, message in rule(parse(file.name, file.read_text(encoding="utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule):
    found = [
        f"lightning_cp/{path}:{line}: {message}"
        for path, file in FILES.items()
        for line, message in rule(parse(path, file.read_text(encoding="utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


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
