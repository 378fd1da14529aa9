"""Rules about what counts tokens, or runs over them from the first to the last."""

import math
from typing import Any

from lightning_cp.diagnostics.audit.call import Call, Finding


def arange(call: Call) -> Finding | None:
    """From 0 in steps of 1, with as many elements as this rank has tokens."""
    return _numbers(call, _counted(call.args))


def linspace(call: Call) -> Finding | None:
    """With as many elements as this rank has tokens."""
    steps = call.get("steps")
    return _numbers(call, steps if type(steps) is int else 0)


def running(call: Call) -> Finding | None:
    """A running sum, product or maximum over as many elements as this rank has tokens."""
    tensor, dim = call.tensor(), call.get("dim")
    if tensor is None or not tensor.ndim:
        return None
    share = tensor.shape[dim]
    if not call.tokens.is_share(share):
        return None
    labelled = tensor.ndim == 2 and dim % 2 == 1 and tensor.shape[0] in call.tokens.rows[share]
    ambiguous = call.tokens.is_width(share) and tensor.ndim > 1
    if ambiguous and not labelled and not call.tokens.at(tensor, dim):
        return None
    instead = "cumsum" if call.name == "cumsum" else "gather_sequence"
    return Finding(
        f"torch.{call.name} over {share} elements, the number of this rank's tokens: every rank "
        f"would start anew at its first token",
        f"use lightning_cp.functional.{instead}, or functional.positions({share}) or the batch's "
        f"position_ids where it numbers tokens",
    )


def _numbers(call: Call, size: int) -> Finding | None:
    if not call.tokens.is_share(size):
        return None
    return Finding(
        f"torch.{call.name} over {size} elements, the number of this rank's tokens: positions "
        f"built from the local length are wrong on all ranks but one",
        f"use lightning_cp.functional.positions({size}), or the batch's position_ids",
    )


def _counted(args: tuple[Any, ...]) -> int:
    """Number of elements of an arange from 0 in steps of 1, else 0."""
    numbers = [arg for arg in args if isinstance(arg, int | float)]  # no symbolic sizes
    start, stop, step = (
        (0, numbers[0], 1) if len(numbers) == 1 else (*numbers, 1)[:3] if numbers else (0, 0, 1)
    )
    return math.ceil(stop) if start == 0 and step == 1 else 0
