"""Losses over elements, which are functions of `torch.nn.functional`, under context parallelism.

A call that took its function by name (`from torch.nn.functional import mse_loss`) before the
strategy was set up is not seen; its loss then differs between peers, which is refused.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.loss import element_loss
from lightning_cp.swap._torch import legacy_reduction
from lightning_cp.swap.where import caller

Function = Callable[..., Any]

WEIGHTED_MEANS = ("mse_loss", "l1_loss")
"""Functions whose mean divides by the sum of `weight`; the others divide by the count."""


def swapped(original: Function) -> Function:
    """The replacement of a loss of `torch.nn.functional`, with the same arguments.

    Its "mean", "sum" and "batchmean" are over the tokens of the whole group, the same on every
    rank; see `lightning_cp.loss.element_loss`. Everything else is the original's.
    """
    names = tuple(inspect.signature(original).parameters)
    by_weight = original.__name__ in WEIGHTED_MEANS
    reductions = {"mean", "sum"} | ({"batchmean"} if original.__name__ == "kl_div" else set())

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # While a compiler traces, the graph is made for both situations; see the operator.
        traced = torch.compiler.is_compiling()
        if SLOT.suspended if traced else SLOT.current is None:
            return original(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        old = given.pop("size_average", None), given.pop("reduce", None)
        reduction = (
            given.get("reduction", "mean") if old == (None, None) else legacy_reduction(*old)
        )
        given["reduction"] = "none" if reduction in reductions else reduction
        losses = original(**given)
        if reduction not in reductions:
            return losses
        weights = given.get("weight") if by_weight and reduction == "mean" else None
        _check_weights(losses, weights)
        if traced:
            return element_loss(losses, weights, reduction=reduction)
        try:
            return element_loss(losses, weights, reduction=reduction)
        except RefusedError as error:
            raise RefusedError(f"{caller(SLOT.current)}: {error}") from error

    return replacement


def _check_weights(losses: Tensor, weights: Tensor | None) -> None:
    if weights is not None and (weights.requires_grad or weights.shape != losses.shape):
        raise RefusedError(
            f"a mean that divides by a weight of shape {tuple(weights.shape)}, for losses of shape "
            f"{tuple(losses.shape)}, that "
            f"{'is learned' if weights.requires_grad else 'is broadcast'}: not supported under "
            f"context parallelism; use lightning_cp.functional.sequence_mean with a mask"
        )


LOSSES: dict[str, Callable[[Function], Function]] = dict.fromkeys(
    (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    ),
    swapped,
)
"""Functions of `torch.nn.functional`, each with what makes its replacement from the original."""
