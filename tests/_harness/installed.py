"""Programs in processes of their own, to which the package looks as if a wheel was installed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = 'lightning_cp = "_lightning_cp_autoload:register"'
"""The entry point of group `torch.backends`, as pyproject.toml has it."""


def run_installed(folder: Path, *command: str, **environment: str) -> str:
    """What a command of this Python prints.

    Args:
        folder: the working folder, which is also searched for modules; gets a `.dist-info` folder.
        command: arguments of the interpreter.
        environment: variables beside those of this process.

    Raises:
        AssertionError: with the end of its errors, if the command failed.
    """
    info = folder / "lightning_cp-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-cp\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + ENTRY.replace('"', "") + "\n")
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
