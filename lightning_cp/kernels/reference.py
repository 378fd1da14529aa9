"""Attention in plain maths: any device, any dtype, any head size; quadratic memory. The oracle."""

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.plan import Tile


class Reference:
    """Materialises the scores of a block in float (double for double inputs)."""

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """Nothing."""
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """Every tile as it is."""
        return (tile,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`; the output is in the dtype of the computation."""
        q, k, v = (_grouped(x, k.shape[1]) for x in (q, k, v))
        scores = _scores(q, k, is_causal, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, saved: Saved, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`: P = exp(S - LSE), dS = P * (dP - rowsum(dO * O))."""
        heads = k.shape[1]
        q, out, grad, k, v = (
            _grouped(x, heads) for x in (saved.q, saved.out, saved.grad_out, k, v)
        )
        lse = saved.lse.unflatten(1, (heads, -1)).unsqueeze(-1).to(q.dtype)
        p = (_scores(q, k, is_causal, scale) - lse).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (grad @ v.mT - delta) * scale
        return (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ grad).sum(2)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, H, S, D]` to `[B, Hk, H / Hk, S, D]` in the dtype of the computation."""
    grouped: Tensor = x.to(state_dtype(x.dtype)).unflatten(1, (kv_heads, -1))
    return grouped


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(k.shape[-2] - q.shape[-2]), float("-inf"))
    return scores
