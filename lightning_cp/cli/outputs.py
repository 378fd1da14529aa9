"""Where commands write, checked before anything runs."""

import argparse
import importlib.util
import os
from pathlib import Path

from lightning_cp.errors import ConfigError


def check_outputs(args: argparse.Namespace, picture: str) -> None:
    """Check `--json FILE` and `--out DIR`, the folder of a picture, where they are given.

    Raises:
        ConfigError: with the option, if something cannot be written or drawn.
    """
    if args.json is not None:
        writable_file(args.json, option="--json")
    if args.out is not None:
        matplotlib_for(picture)
        writable_folder(args.out, option="--out")


def writable_folder(folder: Path, *, option: str) -> None:
    """Make a folder where there is none.

    Raises:
        ConfigError: with the option, if it is none and cannot become one, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} is no folder and cannot become one ({error.strerror}); "
            f"choose a folder that can be written"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {folder} cannot be written; choose a folder that can be")


def writable_file(file: Path, *, option: str) -> None:
    """Check that a file can be written.

    Raises:
        ConfigError: with the option, if it is a folder, or in none that can be written.
    """
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a folder; choose the name of a file")
    if not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(
            f"{option} {file} cannot be written; choose a file in a folder that exists"
        )


def matplotlib_for(picture: str) -> None:
    """Check that a picture can be drawn.

    Raises:
        ConfigError: if matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{picture} is drawn with matplotlib, which is not installed; "
            f"pip install 'lightning-cp[plot]'"
        )
