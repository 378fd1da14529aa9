"""The package and its tests keep the rules that no linter knows; public names; arrows."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from tests._harness.rules import RULES, Rule, Source, parse, short_file, short_functions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_cp"
MAX_PUBLIC_NAMES = 12

# Still to be split; a file that has become short enough may not stay here.
LONG_TESTS = {"tests/test_data.py", "tests/dist/test_bad_input.py"}


def sources(folder: Path, root: Path) -> list[Source]:
    """All files of a folder, named by their path within `root`."""
    return [
        parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    ]


def check(rule: Rule, files: Iterable[Source]) -> None:
    found = [f"{file.path}:{line}: {message}" for file in files for line, message in rule(file)]
    assert not found, "\n" + "\n".join(found)


@pytest.fixture(scope="module")
def package() -> list[Source]:
    return sources(PACKAGE, PACKAGE)


@pytest.fixture(scope="module")
def tests() -> dict[str, Source]:
    return {file.path: file for file in sources(ROOT / "tests", ROOT)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule, package):
    check(rule, package)


def test_tests_are_short(tests):
    check(short_file, (file for path, file in tests.items() if path not in LONG_TESTS))


def test_functions_of_tests_are_short(tests):
    check(short_functions, tests.values())


@pytest.mark.parametrize("path", sorted(LONG_TESTS))
def test_exception_is_needed(path, tests):
    assert list(short_file(tests[path])), "take it out of LONG_TESTS"


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
