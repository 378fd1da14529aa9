"""Masks of tokens, brought to the shape of what they weigh."""

import torch
from torch import Tensor

from lightning_cp.errors import RefusedError


def axis(x: Tensor, dim: int) -> int:
    """`dim` counted from the front.

    Raises:
        RefusedError: if `x` has no such dimension.
    """
    if not -x.ndim <= dim < x.ndim:
        raise RefusedError(f"a tensor of shape {tuple(x.shape)} has no dim {dim}")
    return dim % x.ndim


def aligned(mask: Tensor, x: Tensor, dim: int) -> Tensor:
    """`mask` with the dimensions of `x`, and its size at `dim`.

    Args:
        mask: of as many dimensions as `x` and broadcastable to it; or only the leading dimensions
            of `x` up to `dim`, as `[B, S]` for `[B, S, D]`; or one element per token, `[S]`.
        x: what is weighed.
        dim: the sequence dimension, from the front.

    Raises:
        RefusedError: if the mask does not fit.
    """
    shaped = mask
    if mask.ndim == dim + 1:
        shaped = mask.reshape(*mask.shape, *(1,) * (x.ndim - 1 - dim))
    elif mask.ndim == 1:
        shaped = mask.reshape(-1, *(1,) * (x.ndim - 1 - dim))
        shaped = shaped.reshape(*(1,) * dim, *shaped.shape)
    fits = shaped.ndim == x.ndim and all(
        size in (1, full) for size, full in zip(shaped.shape, x.shape, strict=True)
    )
    if not fits:
        raise RefusedError(
            f"a mask of shape {tuple(mask.shape)} does not fit a tensor of shape {tuple(x.shape)} "
            f"with its tokens at dim {dim}: pass one weight per token, of shape "
            f"{tuple(x.shape[: dim + 1])}, or one that broadcasts"
        )
    sizes = [x.shape[dim] if index == dim else size for index, size in enumerate(shaped.shape)]
    return shaped.expand(sizes)


def weighed(x: Tensor, mask: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """`x` times its weights, and the weights, 0 for dummies and, under a bool mask, where False.

    Args:
        x: any numbers.
        mask: see `aligned`; None weighs every token alike.
        dim: the sequence dimension, from the front.

    Raises:
        RefusedError: if the mask does not fit, or the size at `dim` is not this rank's share.
    """
    real: Tensor = torch.ops.lightning_cp.real(x.detach(), x.shape[dim])
    real = real.view(-1, *(1,) * (x.ndim - 1 - dim)).expand(
        *(1,) * dim, -1, *(1,) * (x.ndim - 1 - dim)
    )
    if mask is None:
        return torch.where(real, x, 0), real
    weights = aligned(mask, x, dim)
    if weights.dtype == torch.bool:
        kept = real & weights
        return torch.where(kept, x, 0), kept
    weights = torch.where(real, weights, 0)
    return torch.where(real, x, 0) * weights, weights
