"""Attention in plain maths: any device, any dtype, any head size; quadratic memory. The oracle."""

from torch import Tensor

from lightning_cp.kernels.base import BlockKernel, Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.kernels.visible import visible
from lightning_cp.plan import Tile


class Reference(BlockKernel):
    """Materialises the scores of a block in float (double for double inputs)."""

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """Nothing."""
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """Every tile as it is."""
        return (tile,)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`; the output is in the dtype of the computation."""
        q, k, v = (_grouped(x, k.shape[1]) for x in (q, k, v))
        scores = _scores(q, k, tile, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v
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
        p = (_scores(q, k, tile, scale) - lse).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (grad @ v.mT - delta) * scale
        return (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ grad).sum(2)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, H, S, D]` to `[B, Hk, H / Hk, S, D]` in the dtype of the computation."""
    grouped: Tensor = x.to(state_dtype(x.dtype)).unflatten(1, (kv_heads, -1))
    return grouped


def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    seen = visible(tile, q.device)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))
