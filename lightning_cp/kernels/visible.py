"""Masks of a block, for kernels that take them."""

import torch
from torch import Tensor

from lightning_cp.plan import Tile


def visible(tile: Tile, device: torch.device) -> Tensor | None:
    """Which keys the rows of a tile see: bool `[Sq, Sk]`, or None where they see all."""
    n, m = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    if tile.band is None and not tile.causal:
        return None
    low, high = tile.band or (1 - n, m - n)
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    return seen.tril_(high).triu_(low)


def additive(tile: Tile, like: Tensor, *, align: int = 1) -> Tensor | None:
    """The mask of a banded tile to be added to scores: `[Sq, Sk]` in the dtype of `like`.

    0 where a key is seen, else -inf; None without a band. Rows start at multiples of `align`.
    """
    if tile.band is None:
        return None
    seen = visible(tile, like.device)
    assert seen is not None  # invariant: a band hides something
    n, m = seen.shape
    mask = like.new_zeros(n, -(-m // align) * align)[:, :m]
    return mask.masked_fill_(~seen, float("-inf"))
