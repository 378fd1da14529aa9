"""What refuses: in compiled code when it runs within a context, and on all ranks alike."""

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


def anywhere(context: Context, wrong: bool) -> bool:
    """Whether something is wrong on any rank, so that all refuse alike; on this one later on."""
    if not context.compare_calls or context.world == 1:
        return wrong
    with SLOT.suspend():
        return bool(max_(torch.tensor([float(wrong)]), group=context.meta))
