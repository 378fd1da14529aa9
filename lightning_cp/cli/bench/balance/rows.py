"""The rows that are laid out: lengths of real files, in twenty orders."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("lengths.json")


class Setting(NamedTuple):
    """A length of rows and a number of ranks."""

    tokens: int
    ranks: int


SETTINGS = (
    Setting(65536, 4),
    Setting(131072, 8),
    Setting(524288, 8),
    Setting(1048576, 32),
)


@cache
def draws() -> tuple[tuple[int, ...], ...]:
    """By seed the lengths of files, longer in sum than any setting's rows."""
    found = json.loads(FILE.read_text(encoding="ascii"))
    return tuple(map(tuple, found["rows"]))


def row(seed: int, tokens: int) -> tuple[int, ...]:
    """The documents of a row: files until their sum is `tokens`, the last one cut off."""
    lengths: list[int] = []
    left = tokens
    for length in draws()[seed]:
        if not left:
            break
        lengths.append(min(length, left))
        left -= lengths[-1]
    return tuple(lengths)
