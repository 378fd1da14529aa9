"""What differs between two outcomes, whatever they hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def differences(one: Any, other: Any, where: str = "") -> list[tuple[str, float]]:
    """Numbers that differ, with their distance; infinite where something else does.

    Args:
        one: what was found: containers, arrays, numbers, text.
        other: what was expected.
        where: name of the place.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [(f"{where}: keys {sorted(one.keys() ^ other.keys())}", np.inf)]
        return [x for key in one for x in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [(f"{where}: {len(one)} for {len(other)}", np.inf)]
        pairs = enumerate(zip(one, other, strict=True))
        return [x for index, (a, b) in pairs for x in differences(a, b, f"{where}.{index}")]
    if isinstance(one, float | np.ndarray) and isinstance(other, float | np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        if a.shape != b.shape:
            return [(f"{where}: shape {a.shape} for {b.shape}", np.inf)]
        far = np.abs(a - b) / np.maximum(np.abs(b), 1)
        return [(where, float(far.max()))] if far.size else []
    return [] if one == other else [(f"{where}: {one!r} for {other!r}", np.inf)]
