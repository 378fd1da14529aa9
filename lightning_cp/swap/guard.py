"""What refuses: in compiled code when it runs within a context, and on all ranks alike."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.reduce import max_
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.where import caller


def outside_only(tensor: Tensor, reason: str) -> Tensor:
    """A copy of `tensor`, in code that is traced now and runs later.

    Args:
        tensor: any tensor that a computation needs which is wrong on a part of the sequence.
        reason: why, and the way out.

    Raises:
        RefusedError: when it runs while a context is active.
    """
    found: Tensor = torch.ops.lightning_cp.outside_only(tensor, reason)
    return found


@torch.library.custom_op("lightning_cp::outside_only", mutates_args=())
def _outside_only(tensor: Tensor, reason: str) -> Tensor:
    if SLOT.current is not None:
        raise RefusedError(f"{caller(SLOT.current)}: {reason}")
    return tensor.clone()


@_outside_only.register_fake
def _(tensor: Tensor, reason: str) -> Tensor:
    return torch.empty_like(tensor)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_outside_only.register_autograd(_differentiate)


def refused(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """A function that is the original outside any context, and refuses to run within one.

    Args:
        original: takes a tensor first.
        reason: why, and the way out.
    """
    first = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # While a compiler traces, the graph is made for both situations; see `outside_only`.
        if torch.compiler.is_compiling():
            if SLOT.suspended:
                return original(*args, **kwargs)
            if args:
                return original(outside_only(args[0], reason), *args[1:], **kwargs)
            return original(**{**kwargs, first: outside_only(kwargs[first], reason)})
        if SLOT.current is not None:
            raise RefusedError(f"{caller(SLOT.current)}: {reason}")
        SLOT.count_plain_attention()
        return original(*args, **kwargs)

    return replacement


def anywhere(context: Context, wrong: bool) -> bool:
    """Whether something is wrong on any rank, so that all refuse alike; on this one later on."""
    if not context.compare_calls or context.world == 1:
        return wrong
    with SLOT.suspend():
        return bool(max_(torch.tensor([float(wrong)]), group=context.meta))
