"""Dropout of attention weights in swapped calls, as the option `attention_dropout` says."""

from typing import Any

import torch
from torch import Tensor

from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.where import caller


def kept_dropout(context: Context, dropout_p: float, *, tiled: bool = False) -> float:
    """The probability with which a call inside a context drops weights.

    Args:
        context: the active context.
        dropout_p: what the call asks for.
        tiled: in compiled code the caller passes its queries through `tile_only`.

    Returns:
        `dropout_p` with "tile", 0 with "off".

    Raises:
        RefusedError: if it is not 0, with "refuse", and in code that is compiled, whose graph must
            be right without a context, too, unless it is `tiled` and "tile".
    """
    if dropout_p == 0:
        return 0.0
    if torch.compiler.is_compiling() and not (tiled and context.dropout == "tile"):
        raise RefusedError(
            f"{caller(context)}: attention dropout of {dropout_p} in compiled code is that of one "
            f"device only, but for torch's attention and transformers with "
            f"attention_dropout='tile'; keep the call out of the graph with torch.compiler.disable"
        )
    if context.dropout == "off":
        return 0.0
    if context.dropout == "refuse":
        raise RefusedError(
            f"{caller(context)}: attention dropout of {dropout_p} in training: which weights are "
            f"dropped depends on the number of ranks, so nothing is dropped unasked; say "
            f"attention_dropout='tile' to drop as many weights as one device, 'off' to drop none, "
            f"or set the attention dropout to 0; other dropout may stay"
        )
    return dropout_p


def tile_only(tensor: Tensor) -> Tensor:
    """A copy of `tensor`, in code that is traced now, with "tile", and may run with other options.

    Raises:
        RefusedError: when it runs in a context with another option.
    """
    found: Tensor = torch.ops.lightning_cp.tile_only(tensor)
    return found


@torch.library.custom_op("lightning_cp::tile_only", mutates_args=())
def _tile_only(tensor: Tensor) -> Tensor:
    context = SLOT.current
    if context is not None and context.dropout != "tile":
        raise RefusedError(
            f"{caller(context)}: attention dropout in code that was compiled with "
            f"attention_dropout='tile' runs with {context.dropout!r}; compile it anew"
        )
    return tensor.clone()


@_tile_only.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    return grad


_tile_only.register_autograd(_differentiate)
