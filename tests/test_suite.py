"""What the default run of pytest takes: every file of tests, and of every grid a part."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._harness.grid import rotated

ROOT = Path(__file__).resolve().parent.parent


def left_out(config: pytest.Config, folder: Path) -> list[str]:
    """Files of tests, and folders above them, that pytest passes by on its way from `folder`."""
    files = sorted(folder.rglob("test_*.py"))
    paths = {path for file in files for path in (file, *file.parents) if folder in path.parents}
    ask = config.hook.pytest_ignore_collect
    passed_by = [path for path in sorted(paths) if ask(collection_path=path, config=config)]
    return [path.relative_to(folder).as_posix() for path in passed_by]


def test_no_file_is_left_out(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert pytestconfig.getini("python_files") == ["test_*.py", "*_test.py"]
    assert left_out(pytestconfig, ROOT / "tests") == []


def test_a_folder_that_is_left_out_is_seen(pytestconfig, tmp_path):
    for name in ("dist", "build"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_a.py").touch()
    assert left_out(pytestconfig, tmp_path) == ["build"]


def test_every_file_is_linted():
    """The default of ruff passes every folder called dist by."""
    program = shutil.which("ruff", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("ruff is not installed")
    command = [program, "check", "--show-files", "lightning_cp", "tests", "examples"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seen = {Path(line).resolve() for line in shown.stdout.splitlines()}
    files = {file for name in command[3:] for file in (ROOT / name).rglob("*.py")}
    assert files - seen == set()


@pytest.mark.parametrize("subjects", [4, 5, 9])
def test_a_part_of_a_grid_has_every_subject_and_every_combination(subjects):
    ways = [(world, layout) for world in (2, 3) for layout in ("contiguous", "zigzag")]
    cases = rotated(range(subjects), ways)
    taken = [case.values for case in cases if not case.marks]
    assert {case.values for case in cases} == {(x, *way) for x in range(subjects) for way in ways}
    assert [subject for subject, *_ in taken] == list(range(subjects))
    assert {tuple(way) for _, *way in taken} == set(ways)
    assert {mark.name for case in cases for mark in case.marks} == {"full"}
