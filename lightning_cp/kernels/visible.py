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


def blocks(tile: Tile, rows: int, keys: int) -> tuple[Tile, ...]:
    """A tile as blocks of at most so many rows and keys; those that are hidden are left out.

    A row of a block may see none of its keys.
    """
    n, m = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    if n <= rows and m <= keys:
        return (tile,)
    low, high = tile.band or (1 - n, m - n if tile.causal else m - 1)
    found = []
    for a in range(0, n, rows):
        for c in range(0, m, keys):
            r, s = min(rows, n - a), min(keys, m - c)
            band = (low + a - c, high + a - c)
            if band[1] < 1 - r or band[0] > s - 1:
                continue
            full = band[0] <= 1 - r and band[1] >= s - 1
            q, k = tile.q[0] + a, tile.k[0] + c
            found.append(Tile((q, q + r), (k, k + s), row=tile.row, band=None if full else band))
    return tuple(found)


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
