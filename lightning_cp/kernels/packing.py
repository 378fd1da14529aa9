"""Tiles as sequences of one call that takes many: which go together, and where their rows lie.

Legend: B batch, H heads, S rows, N rows of all sequences, D head size.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.plan import Tile
from lightning_cp.spans import Spans

Window = tuple[int, int]
"""How many keys before and after its diagonal a row sees, -1 for all of them. The diagonal ends at
the bottom right corner: row `i` of `n` stands at key `len(k) - n + i`."""

FULL: Window = (-1, -1)
CAUSAL: Window = (-1, 0)


class Pack(NamedTuple):
    """Tiles with one window.

    Attributes:
        window: what their rows see.
        tiles: sorted by batch row, queries, keys.
        shared: the tiles are for all batch rows (`row` is None), else each is for its own.
    """

    window: Window
    tiles: tuple[Tile, ...]
    shared: bool

    def sequences(self, batch: int) -> Iterator[tuple[int, Tile]]:
        """Batch row and tile of every sequence, in the order in which their rows are packed."""
        for row in range(batch if self.shared else 1):
            for tile in self.tiles:
                yield (row if tile.row is None else tile.row), tile


def window(tile: Tile) -> Window:
    """The window of a tile; a band that hides nothing on a side is unbounded there."""
    n, m = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    if tile.band is None:
        return CAUSAL if tile.causal and n > 1 else FULL
    low, high = tile.band
    left, right = m - n - low, high - (m - n)
    assert min(left, right) >= 0  # invariant: every row sees a key, and every key is seen
    return (-1 if low <= 1 - n else left), (-1 if high >= m - 1 else right)


def packs(tiles: Sequence[Tile]) -> list[Pack]:
    """All tiles, in as few packs as their windows allow.

    A full tile of one row is a causal one, too, and goes with these where there are any: so do
    documents of one token among longer ones.
    """
    found: dict[tuple[Window, bool], list[Tile]] = {}
    for tile in tiles:
        found.setdefault((window(tile), tile.row is None), []).append(tile)
    for shared in (True, False):
        full, causal = found.get((FULL, shared)), found.get((CAUSAL, shared))
        if full and causal:
            causal += [tile for tile in full if tile.q[1] - tile.q[0] == 1]
            full[:] = [tile for tile in full if tile.q[1] - tile.q[0] > 1]
    return [
        Pack(sees, tuple(sorted(own, key=lambda t: (t.row or 0, t.q, t.k))), shared)
        for (sees, shared), own in found.items()
        if own
    ]


def runs(tiles: Sequence[Tile], *, keys: bool) -> Iterator[Tile]:
    """Neighbouring tiles joined where their queries, and with `keys` their keys, adjoin.

    A joined tile says which rows it is about and nothing of what they see; its keys are the span
    that holds those of all.
    """
    last: Tile | None = None
    for tile in tiles:
        adjoins = last is not None and (last.row, last.q[1]) == (tile.row, tile.q[0])
        if last is not None and adjoins and (not keys or last.k[1] == tile.k[0]):
            span = min(last.k[0], tile.k[0]), max(last.k[1], tile.k[1])
            last = Tile((last.q[0], tile.q[1]), span, row=tile.row)
            continue
        if last is not None:
            yield last
        last = tile
    if last is not None:
        yield last


def adjoining(spans: Spans) -> bool:
    """Whether each span starts where the one before stops."""
    return all(left[1] == right[0] for left, right in pairwise(spans))


def cumulative(spans: Spans, device: torch.device) -> Tensor:
    """Where each sequence starts, and where the last stops: int32 `[len(spans) + 1]`."""
    edges = [0]
    for start, stop in spans:
        edges.append(edges[-1] + stop - start)
    return torch.tensor(edges, dtype=torch.int32, device=device)


def indices(spans: Spans, device: torch.device) -> Tensor:
    """The integers of the spans in order: int64 `[N]`."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)


def unpacked(x: Tensor, copies: int) -> Tensor:
    """Rows of packed sequences `[copies * N, H, D]` as `[copies, H, N, D]`, a view."""
    split: Tensor = x.unflatten(0, (copies, -1))
    return split.transpose(1, 2)
