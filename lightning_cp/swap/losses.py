"""`cross_entropy` and `nll_loss` under context parallelism."""

import torch
from torch import Tensor

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.loss import group_mean, token_sums
from lightning_cp.swap._torch import is_tracing, original
from lightning_cp.swap.shared import whole
from lightning_cp.swap.where import caller

NONE, MEAN, SUM = 0, 1, 2


def cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The override: mean or sum over the tokens of the whole group, the same on every rank.

    A mean divides by the weight of the valid tokens of the group (0 where there is none); without
    reduction the loss stays one value per local token.

    Raises:
        RefusedError: if the step shifted labels on the shard.
    """

    def plain(how: int) -> Tensor:
        with SLOT.suspend():
            return original("cross_entropy_loss")(
                self, target, weight, how, ignore_index, label_smoothing
            )

    if _untouched(self, target, reduction):
        return plain(reduction)
    losses = plain(NONE)
    if target.is_floating_point():
        weights = torch.ones_like(losses)
    else:
        weights = _weights(target, weight, ignore_index, losses.dtype)
    return _reduced(losses, weights, reduction)


def nll_loss_nd(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    """The override; see `cross_entropy_loss`."""

    def plain(how: int) -> Tensor:
        with SLOT.suspend():
            return original("nll_loss_nd")(self, target, weight, how, ignore_index)

    if _untouched(self, target, reduction):
        return plain(reduction)
    return _reduced(plain(NONE), _weights(target, weight, ignore_index, self.dtype), reduction)


def _untouched(scores: Tensor, target: Tensor, reduction: int) -> bool:
    """Nothing to swap: token by token, or no context now and none when a trace will run."""
    traced = is_tracing(scores, target) and not SLOT.suspended
    return reduction == NONE or (SLOT.current is None and not traced)


def _weights(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    valid = target != ignore_index
    if weight is None:
        return valid.to(dtype)
    return weight[torch.where(valid, target, 0)].to(dtype) * valid


def _reduced(losses: Tensor, weights: Tensor, reduction: int) -> Tensor:
    """The mean or sum over the group; losses of scores that ranks share are on each of them."""
    losses, weights = whole(losses), whole(weights)
    try:
        if reduction == MEAN:
            return group_mean(losses, weights)
        return token_sums(losses, weights)[0].to(losses.dtype)
    except RefusedError as error:
        raise RefusedError(f"{caller(SLOT.current)}: {error}") from error
