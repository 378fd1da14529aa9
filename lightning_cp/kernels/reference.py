"""Attention in plain maths: any device, dtype, head size and term of scores. The oracle.

Legend: B batch, H query heads, Hk key heads, n queries and m keys of a block.
"""

import torch
from torch import Tensor

from lightning_cp.kernels.base import BlockKernel, Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.kernels.terms import Terms
from lightning_cp.kernels.visible import blocks
from lightning_cp.plan import Tile

QUERIES, KEYS = 256, 1024
"""The most queries and keys of a block, whose scores are materialised."""


class Reference(BlockKernel):
    """Materialises the scores of a block in float (double for double inputs)."""

    supports = frozenset({"softcap", "alibi_slopes", "relative_bias", "mask_mod", "dropout"})

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """Nothing."""
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """Blocks of bounded size."""
        return blocks(tile, QUERIES, KEYS)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`; the output is in the dtype of the computation."""
        q, k, v = (_grouped(x, k.shape[1]) for x in (q, k, v))
        terms = Terms(self.scores, tile, q)
        scores, _ = terms.apply(q @ k.mT * scale)
        lse = scores.logsumexp(-1)
        out = terms.dropped((scores - _finite(lse).unsqueeze(-1)).exp()) @ v
        return out.flatten(1, 2), lse.flatten(1, 2)

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward`: P = exp(S - LSE), dS = P * (dP - rowsum(dO * O))."""
        heads = k.shape[1]
        q, out, grad, k, v = (
            _grouped(x, heads) for x in (saved.q, saved.out, saved.grad_out, k, v)
        )
        lse = saved.lse.unflatten(1, (heads, -1)).unsqueeze(-1).to(q.dtype)
        terms = Terms(self.scores, tile, q)
        scores, slope = terms.apply(q @ k.mT * scale)
        p = (scores - _finite(lse)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (terms.dropped(grad @ v.mT) - delta)
        terms.learn(ds)
        ds = (ds if slope is None else ds * slope) * scale
        dv = terms.dropped(p).mT @ grad
        return (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), dv.sum(2)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, H, S, D]` to `[B, Hk, H / Hk, S, D]` in the dtype of the computation."""
    grouped: Tensor = x.to(state_dtype(x.dtype)).unflatten(1, (kv_heads, -1))
    return grouped


def _finite(lse: Tensor) -> Tensor:
    """Rows that see no key of the block get weights of 0, whatever is subtracted."""
    return torch.where(lse == float("-inf"), 0, lse)
