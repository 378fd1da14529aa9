"""The audit: patterns in a first forward that would be silently wrong on a shard."""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.where import caller

aten = torch.ops.aten

NUMBERING = (aten.arange, aten.cumsum, aten.cumsum_)
"""Operators that number tokens."""

SMALLEST = 3
"""Shares below this are too small to tell a sequence from any other dimension."""


class Audit(TorchDispatchMode):
    """Refuses position-like tensors built from the local length.

    `arange` from 0 in steps of 1, and `cumsum`, over exactly as many elements as this rank has
    tokens mean that the model numbers its local tokens as if they were the whole sequence.

    Args:
        context: the context of the step.

    Raises:
        RefusedError: from the offending call, on every rank; names the module and the way out.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context
        shares = {s.layout.size(context.rank) for s in context.sequences.values()}
        self._shares = {share for share in shares if share >= SMALLEST}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code may run, and be compiled, while this mode only looks."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at one call of an operator, then run it."""
        packet = func.overloadpacket
        if packet in NUMBERING and SLOT.current is not None:
            size = _counted(args) if packet is aten.arange else _summed(*args[:2])
            if size in self._shares:
                self._refuse(packet.__name__, size)
        return func(*args, **(kwargs or {}))

    def _refuse(self, name: str, size: int) -> None:
        raise RefusedError(
            f"{caller(self._context)}: torch.{name} over {size} elements, the number of this "
            f"rank's tokens: positions built from the local length are wrong on all ranks but one; "
            f"use lightning_cp.functional.positions({size}), or the batch's position_ids, or wrap "
            f"the call in lightning_cp.functional.local() if it does not number tokens"
        )


def _counted(args: tuple[Any, ...]) -> int:
    """Number of elements of an arange from 0 in steps of 1, else 0."""
    numbers = [arg for arg in args if isinstance(arg, int | float)]  # no symbolic sizes
    start, stop, step = (
        (0, numbers[0], 1) if len(numbers) == 1 else (*numbers, 1)[:3] if numbers else (0, 0, 1)
    )
    return math.ceil(stop) if start == 0 and step == 1 else 0


def _summed(tensor: torch.Tensor, dim: int) -> int:
    size = tensor.shape[dim] if tensor.ndim else 0
    return size if isinstance(size, int) else 0
