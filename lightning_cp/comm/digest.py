"""Agreement: every rank of a group must hold the same numbers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.failure import named
from lightning_cp.errors import MismatchError

CLOSE = 1e-4
"""Relative difference below which two floats count as the same."""


class Digest:
    """One fixed-size MAX all-reduce of named numbers and their negatives.

    Every rank passes the same names in the same order, unconditionally. Integers must fit into 62
    bits and be equal; floats must be close, and two NaNs are.

    Args:
        fields: numbers by name.
        details: readable value of a field, shown when ranks differ; the number where not given.
        group: CPU process group; every rank of it calls.
    """

    def __init__(
        self, fields: Mapping[str, int | float], details: Mapping[str, str], group: Any
    ) -> None:
        self._fields, self._details, self._group = dict(fields), details, group
        codes = [_ordered(x) if isinstance(x, float) else x for x in fields.values()]
        values = torch.tensor(codes, dtype=torch.int64)
        self._sent = torch.stack([values, -values])
        with named("the comparison of a micro-step"):
            self._work = dist.all_reduce(
                self._sent, op=dist.ReduceOp.MAX, group=group, async_op=True
            )

    def wait(self) -> None:
        """Wait for the peers and compare.

        Raises:
            MismatchError: on every rank, if any field differs; names the fields and the values of
                every rank.
            PeerError: if a peer failed.
        """
        with named("the comparison of a micro-step"):
            self._work.wait()
        high, low = self._sent[0].tolist(), (-self._sent[1]).tolist()
        differing = [
            name
            for (name, value), most, least in zip(self._fields.items(), high, low, strict=True)
            if most != least and not (isinstance(value, float) and _close(most, least))
        ]
        if differing:
            self._raise(differing)

    def _raise(self, differing: list[str]) -> None:
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        shown = {name: self._details.get(name, str(self._fields[name])) for name in differing}
        with named("the comparison of a micro-step"):
            dist.all_gather_object(gathered, shown, group=self._group)
        lines = [
            f"  {name}: "
            + "; ".join(f"rank {rank} has {values[name]}" for rank, values in enumerate(gathered))
            for name in differing
        ]
        raise MismatchError(
            "the ranks of one context-parallel group must work on the same micro-batch, but they "
            "disagree:\n" + "\n".join(lines)
        )


def _ordered(value: float) -> int:
    """An integer for every float32, in the order of the floats; NaN above all."""
    if math.isnan(value):
        return 0x7FC00000
    bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _value(code: int) -> float:
    bits = torch.tensor(abs(code), dtype=torch.int32).view(torch.float32)
    return math.copysign(float(bits), code)


def _close(most: int, least: int) -> bool:
    high, low = _value(most), _value(least)
    return abs(high - low) <= CLOSE * max(abs(high), abs(low))
