"""Dropout of attention weights in swapped calls, as the option `attention_dropout` says."""

import torch

from lightning_cp.context import Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.where import caller


def kept_dropout(context: Context, dropout_p: float) -> float:
    """The probability with which a call inside a context drops weights.

    Args:
        context: the active context.
        dropout_p: what the call asks for.

    Returns:
        `dropout_p` with "tile", 0 with "off".

    Raises:
        RefusedError: if it is not 0, with "refuse", and in code that is compiled, whose graph must
            be right without a context, too.
    """
    if dropout_p == 0:
        return 0.0
    if torch.compiler.is_compiling():
        raise RefusedError(
            f"{caller(context)}: attention dropout of {dropout_p} in compiled code is that of one "
            f"device only; keep the call out of the graph with torch.compiler.disable"
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
