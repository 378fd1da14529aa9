"""The demo's text: the sources of the Python standard library, which every machine has."""

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_cp.errors import ConfigError

SEPARATOR = b"\0"
"""Between files; occurs in no source."""
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings"}
"""Folders that are no part of the library, and one of tables of characters."""


def source_text(size: int, *, seed: int, folder: Path | None = None) -> bytes:
    """Python sources, joined in an order that depends on `seed` alone.

    Args:
        size: how many bytes are wanted.
        seed: order of the files.
        folder: where to look, the standard library where not given.

    Returns:
        `size` bytes, fewer where all files together are shorter.

    Raises:
        ConfigError: if there are no sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if SKIPPED.isdisjoint(path.relative_to(folder).parts)
    )
    if not files:
        raise ConfigError(
            f"found 0 Python sources under {folder}; run the demo with a Python whose standard "
            f"library is installed as sources"
        )
    random.Random(seed).shuffle(files)
    text = bytearray()
    for file in files:
        if len(text) >= size:
            break
        text += (folder / file).read_bytes() + SEPARATOR
    return bytes(text[:size])


class Windows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text, with labels that are shifted already.

    Item `i` has, each int64 `[seqlen]`: `input_ids`, bytes `i * seqlen` and on; `labels`, the byte
    after each of them; `position_ids`, counted from 0.

    Args:
        text: the bytes.
        seqlen: length of a window.

    Raises:
        ConfigError: if the text is too short for one window.
    """

    def __init__(self, text: bytes, seqlen: int) -> None:
        if len(text) < seqlen + 1:
            raise ConfigError(
                f"--seqlen {seqlen} needs {seqlen + 1} bytes of text and there are {len(text)}; "
                f"choose --seqlen {max(len(text) - 1, 1)} or less"
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._seqlen = seqlen

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._seqlen

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._seqlen
        window = self._bytes[start : start + self._seqlen + 1].long()
        return {
            "input_ids": window[:-1],
            "labels": window[1:],
            "position_ids": torch.arange(self._seqlen),
        }
