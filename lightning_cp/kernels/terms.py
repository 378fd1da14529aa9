"""The terms of scores in plain maths, for one block, and their gradients.

Legend: B batch, Hk key heads, G query heads of a key head, n queries, m keys of a block.
"""

from zlib import crc32

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.scores import Dropout, Scores
from lightning_cp.kernels.visible import visible
from lightning_cp.plan import Tile
from lightning_cp.spans import Span, Spans


class Terms:
    """What the scores of a call are made of in one block.

    Args:
        scores: of the call, with the global positions of the rows.
        tile: the block.
        q: its queries `[B, Hk, G, n, D]`.
    """

    def __init__(self, scores: Scores, tile: Tile, q: Tensor) -> None:
        self._scores, self._tile = scores, tile
        self._batch, self._groups, self._dtype = q.shape[0], q.shape[1:3], q.dtype
        self._device = q.device
        self._kept: Tensor | None = None
        learned = scores.per_head
        if scores.mask_mod is None and learned.slopes is None and learned.table is None:
            return
        self._queries = positions(scores.queries, tile.q, q.device)
        self._keys = positions(scores.keys, tile.k, q.device)
        self._distance = self._keys - self._queries[:, None]

    def apply(self, raw: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores `[B, Hk, G, n, m]` with all terms, -inf where a key is hidden.

        Returns:
            The scores, and their derivative with respect to the raw ones, None where it is 1.
        """
        slope, cap = None, self._scores.softcap
        if cap is not None:
            bent = (raw / cap).tanh()
            raw, slope = bent * cap, 1 - bent * bent
        slopes, table = self._scores.per_head.slopes, self._scores.per_head.table
        if slopes is not None:
            raw = raw - self._by_head(slopes)[..., None, None] * self._distance.abs()
        if table is not None:
            raw = raw + self._by_head(table)[..., self._column(table)]
        for seen in (visible(self._tile, raw.device), self._shown()):
            if seen is not None:
                raw = raw.masked_fill(~seen, float("-inf"))
        return raw, slope

    def learn(self, ds: Tensor) -> None:
        """Add to the gradients of what the scores are made of, given those of the scores."""
        slopes, table = self._scores.grads.slopes, self._scores.grads.table
        if slopes is None and table is None:
            return
        summed = ds.sum(0).flatten(0, 1)
        if slopes is not None:
            slopes.sub_((summed * self._distance.abs()).sum((1, 2)).to(slopes.dtype))
        if table is not None:
            column = self._column(table).flatten()
            table.index_add_(1, column, summed.flatten(1).to(table.dtype))

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights, or their gradients, with those of dropped pairs 0 and the others larger."""
        dropout = self._scores.dropout
        if dropout is None:
            return weights
        if self._kept is None:
            self._kept = self._draw(dropout, weights)
        return weights * self._kept

    def _draw(self, dropout: Dropout, like: Tensor) -> Tensor:
        """Numbers that depend on the call, the heads and the rows of the block alone."""
        scores, tile = self._scores, self._tile
        place = (scores.first_head, scores.queries, scores.keys, tile.q, tile.k, tile.row)
        generator = torch.Generator(like.device)
        generator.manual_seed(crc32(repr((dropout.seed, place)).encode()))
        kept = torch.empty_like(like, memory_format=torch.contiguous_format)
        kept.bernoulli_(1 - dropout.p, generator=generator)
        return kept if dropout.p == 1 else kept.div_(1 - dropout.p)

    def _shown(self) -> Tensor | None:
        """What the function of the call shows: bool `[B, Hk, G, n, m]`."""
        if self._scores.mask_mod is None:
            return None
        heads, first = self._groups[0] * self._groups[1], self._scores.first_head
        row, count = (self._tile.row or 0), self._batch
        shown: Tensor = self._scores.mask_mod(
            torch.arange(row, row + count, device=self._device).view(-1, 1, 1, 1),
            torch.arange(first, first + heads, device=self._device).view(1, -1, 1, 1),
            self._queries.view(1, 1, -1, 1),
            self._keys.view(1, 1, 1, -1),
        )
        size = (count, heads, self._queries.shape[0], self._keys.shape[0])
        found: Tensor = shown.expand(size).unflatten(1, self._groups)
        return found

    def _by_head(self, x: Tensor) -> Tensor:
        """`[H, ...]` as `[Hk, G, ...]` in the dtype of the computation."""
        found: Tensor = x.to(self._dtype).unflatten(0, self._groups)
        return found

    def _column(self, table: Tensor) -> Tensor:
        """Where in a table the distances of the block are: int64 `[n, m]`."""
        most = table.shape[1] // 2
        return self._distance.clamp(-most, most) + most


def positions(spans: Spans, rows: Span, device: torch.device) -> Tensor:
    """Global positions of some rows of a buffer that holds `spans` one after the other: int64."""
    found, at = [], 0
    for start, stop in spans:
        low, high = max(rows[0] - at, 0), min(rows[1] - at, stop - start)
        if low < high:
            found.append(torch.arange(start + low, start + high))
        at += stop - start
    return torch.cat(found).to(device)


def sink_gradient(saved: Saved, sinks: Tensor) -> Tensor:
    """Gradient `[H]` of sinks, given the results that these are a part of.

    A sink has the weight `exp(sink - lse)` and a value of 0, so its score has the gradient
    `-weight * rowsum(dO * O)`, summed over rows.
    """
    dtype = saved.lse.dtype
    score = sinks.to(dtype)[:, None]
    blind = saved.lse == float("-inf")
    weight = (score - saved.lse).masked_fill(blind, float("-inf")).exp()
    found = sinks.new_empty(sinks.shape, dtype=dtype)
    for head in range(len(sinks)):  # one at a time: the product is in float
        delta = (saved.grad_out[:, head].to(dtype) * saved.out[:, head].to(dtype)).sum(-1)
        found[head] = -(weight[:, head] * delta).sum()
    return found
