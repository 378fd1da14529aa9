"""The code in README.md and docs/ is run: Python here, shell commands by .ci/run.

The `python` blocks of a page run in order, as one program. Every line of a `bash` block is a
command of `.ci/run`, which may add options to it. The comment

    <!-- not executed: needs a GPU -->

before a block leaves it out, with one of two reasons: `needs a GPU` or `needs the network`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CI = ROOT / ".ci" / "run"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

EXECUTED = ("python", "bash")
SHOWN = ("mermaid", "text", "toml", "yaml")
REASONS = ("needs a GPU", "needs the network")

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)$")
MARKER = re.compile(r"^<!-- not executed: (?P<reason>.*?) -->$")


class Block(NamedTuple):
    """One fenced block: its language, its lines without indent, the number of its first line."""

    language: str
    lines: list[str]
    start: int
    excuse: str | None


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    fence, excuse = None, None
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence = match
            found.append(Block(match["language"].strip(), [], number + 1, excuse))
        elif fence is not None and line.strip() == "```":
            fence, excuse = None, None
        elif fence is not None:
            found[-1].lines.append(line.removeprefix(fence["indent"]))
        elif line.strip():
            marker = MARKER.match(line.strip())
            excuse = marker["reason"] if marker else None
    return found


def faults(text: str) -> list[str]:
    """Blocks that would escape the checks."""
    found = []
    for block in blocks(text):
        if block.language not in EXECUTED + SHOWN:
            found.append(
                f"line {block.start - 1}: a block of {block.language!r}; write python or bash for "
                f"what runs, one of {SHOWN} for what is only shown"
            )
        if block.excuse is not None and block.excuse not in REASONS:
            found.append(f"line {block.start - 1}: {block.excuse!r} is no reason; only {REASONS}")
    return found


def program(text: str) -> str:
    """The python blocks of a page as one program, every line at its line number in the page."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language == "python" and block.excuse is None:
            lines[block.start - 1 : block.start - 1 + len(block.lines)] = block.lines
    return "\n".join(lines).rstrip() + "\n"


def commands(script: str) -> list[list[str]]:
    """The lines of a shell script as words; what is no plain command is left out."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if words:
            found.append(words)
    return found


def unknown(text: str, script: str) -> list[str]:
    """Lines of the bash blocks of `text` that `script` does not run, with options added or not."""
    run = commands(script)
    shown = [
        words
        for block in blocks(text)
        if block.language == "bash" and block.excuse is None
        for words in commands("\n".join(block.lines))
    ]
    return [
        shlex.join(words)
        for words in shown
        if not any(
            line[: len(words)] == words and all(w.startswith("-") for w in line[len(words) :][:1])
            for line in run
        )
    ]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=page_id)
def test_no_block_escapes(page):
    assert faults(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=page_id)
def test_commands_are_run_by_ci(page):
    wrong = unknown(page.read_text(encoding="utf-8"), CI.read_text(encoding="utf-8"))
    assert not wrong, f"{page_id(page)} shows commands that .ci/run does not run: {wrong}"


def test_examples_are_run_by_ci():
    run = [shlex.join(words) for words in commands(CI.read_text(encoding="utf-8"))]
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    missing = [path for path in examples if not any(f"python {path}" in line for line in run)]
    assert not missing, f".ci/run does not run {missing}"


with_code = [page for page in PAGES if program(page.read_text(encoding="utf-8")).strip()]


# Imports take seconds, so they are done once; then every page has a process of its own.
SERVER = """
import os, runpy, sys, traceback
import lightning, transformers

for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(script + ".err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script]
        code = 0
        try:
            runpy.run_path(script, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    print(script, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_scripts(folder: Path, texts: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Exit code and errors of programs, by name."""
    scripts = {name: folder / f"{number}.py" for number, name in enumerate(texts)}
    for name, script in scripts.items():
        script.write_text(texts[name], encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", SERVER, *map(str, scripts.values())],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    codes = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines() if line[-2:-1] == " ")
    return {
        name: (codes[str(script)], Path(f"{script}.err").read_text(encoding="utf-8"))
        for name, script in scripts.items()
    }


FAILING = "a page that fails"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    programs = {page_id(page): program(page.read_text(encoding="utf-8")) for page in with_code}
    return run_scripts(tmp_path_factory.mktemp("pages"), {FAILING: "\n\n1 / 0\n", **programs})


@pytest.mark.parametrize("page", with_code, ids=page_id)
def test_python_runs(page, results):
    code, errors = results[page_id(page)]
    assert code == "0", f"{page_id(page)} (same line numbers)\n{errors[-4000:]}"


def test_a_page_that_fails_is_seen(results):
    code, errors = results[FAILING]
    assert code == "1"
    assert "line 3" in errors
    assert "ZeroDivisionError" in errors


PAGE = """\
Text.

```python
x = 1
```

- in a list:

  ```python
  assert x == 1
  ```

```bash
pytest
lightning-cp demo  # two minutes
```
"""


def test_program_keeps_line_numbers():
    assert program(PAGE).splitlines()[3] == "x = 1"
    assert program(PAGE).splitlines()[9] == "assert x == 1"
    exec(compile(program(PAGE), "page", "exec"), {})


def test_marked_blocks_are_left_out():
    text = "<!-- not executed: needs a GPU -->\n\n```python\nfail\n```\n\n```python\nx = 1\n```\n"
    assert program(text).strip() == "x = 1"
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not executed: too slow -->\n```python\nx\n```\n", "is no reason"),
        ("```sh\npytest\n```\n", "a block of 'sh'"),
        ("```\npytest\n```\n", "a block of ''"),
        ("```py\nx\n```\n", "a block of 'py'"),
    ],
)
def test_faults_are_seen(text, message):
    assert message in faults(text)[0]


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("pytest --durations=5\nlightning-cp demo \\\n  --out x\n", []),
        ("pytest\nlightning-cp demo2\n", ["lightning-cp demo"]),
        ("pytest tests/unit\nlightning-cp demo\n", ["pytest"]),
        ("# pytest\necho pytest\nlightning-cp demo\n", ["pytest"]),
    ],
)
def test_unknown_commands_are_seen(script, wrong):
    assert unknown(PAGE, script) == wrong
