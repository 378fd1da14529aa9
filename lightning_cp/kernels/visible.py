"""Masks of a block, for kernels that take them, and blocks in which a band is dense."""

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


def square(tile: Tile, rows: int) -> tuple[Tile, ...]:
    """A tile as blocks for kernels whose causal blocks are aligned at the top left.

    A causal tile becomes a full block left of a square causal one, a banded one blocks of at most
    `rows` queries.
    """
    if tile.band is not None:
        return narrow(tile, rows)
    corner = tile.k[1] - (tile.q[1] - tile.q[0])
    if not tile.causal or corner == tile.k[0]:
        return (tile,)
    return (
        tile._replace(k=(tile.k[0], corner), causal=False),
        tile._replace(k=(corner, tile.k[1])),
    )


def narrow(tile: Tile, rows: int) -> tuple[Tile, ...]:
    """A banded tile as blocks of at most `rows` queries with just the keys that these see."""
    assert tile.band is not None  # invariant: only banded tiles are narrowed
    (start, stop), (first, last) = tile.q, tile.k
    low, high = tile.band
    blocks = []
    for at in range(0, stop - start, rows):
        n = min(rows, stop - start - at)
        begin, end = max(0, at + low), min(last - first, at + n + high)
        band = (low + at - begin, high + at - begin)
        full = band[0] <= 1 - n and band[1] >= end - begin - 1
        blocks.append(
            Tile(
                (start + at, start + at + n),
                (first + begin, first + end),
                row=tile.row,
                band=None if full else band,
            )
        )
    return tuple(blocks)
