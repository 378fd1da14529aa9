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
