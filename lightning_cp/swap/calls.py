"""Functions that are computed over the whole sequence while a context is active."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.guard import refused
from lightning_cp.swap.where import caller

Function = Callable[..., Any]
Arguments = dict[str, Any]


def swapped(
    original: Function,
    compute: Callable[[Context, Arguments], Any],
    lacks: Callable[[Arguments], str | None],
    compiled: str,
) -> Function:
    """The replacement of an attention function.

    Compilers leave calls within a context out of their graphs. A graph that was made outside any
    context is another one, and refuses to run within.

    Args:
        original: takes a tensor first.
        compute: the same within a context, given the arguments by name with defaults.
        lacks: what of a call `compute` does not do, and the way out; None if nothing. Where one
            rank holds whole rows, the original does it.
        compiled: why a graph cannot hold a call within a context, and the way out.
    """
    parameters, elsewhere = signature(original), refused(original, compiled)

    def call_within(context: Context, *args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        reason = lacks(call.arguments)
        if reason is not None and context.world == 1:
            context.log.attention += 1
            return original(*args, **kwargs)
        try:
            if reason is not None:
                raise RefusedError(reason)
            return compute(context, call.arguments)
        except RefusedError as error:
            raise RefusedError(f"{caller(context)}: {error}") from error

    within = torch.compiler.disable(call_within, reason=compiled)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        context = SLOT.current
        return elsewhere(*args, **kwargs) if context is None else within(context, *args, **kwargs)

    return replacement


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lse: Tensor) -> Tensor:
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RefusedError(
            "the gradient of attention's LSE is not supported under context parallelism; use "
            "lse.detach()"
        )


def without_gradient(lse: Tensor) -> Tensor:
    """The LSE of a call, whose backward refuses to run."""
    found: Tensor = _WithoutGradient.apply(lse)  # type: ignore[no-untyped-call]
    return found
