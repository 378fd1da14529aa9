"""The fused attention kernel for CPUs that ships with torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.kernels.base import BlockKernel, Saved
from lightning_cp.kernels.visible import additive
from lightning_cp.plan import Tile
from lightning_cp.plan.memory import BANDED, slow_in_half
from lightning_cp.plan.rounds import square


class Sdpa(BlockKernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward.

    [Note: CPU flash kernel] `is_causal` is aligned at the top left, so a tile with more keys than
    queries is split into a full and a square block. A row without visible keys would get output 0
    and LSE 0 in place of -inf; tiles have no such rows. The backward accepts the output and LSE
    over all keys together with one block of keys, which makes a sum over blocks exact. A band
    becomes blocks of a few rows with an additive mask, which must be of the dtype of the queries.
    Keys and values are of one size: zeros fill up the smaller ones, which changes no result.
    """

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if q.device.type != "cpu":
            return f"has no path for {q.device.type} tensors"
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """A full block left of a square causal one, or a few rows; see [Note: CPU flash kernel]."""
        return square(tile, BANDED)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`; the output is in the dtype of `q`."""
        head, size = v.shape[-1], max(q.shape[-1], v.shape[-1])
        q, k, v = (_rows_contiguous(x, size) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, tile.causal, attn_mask=additive(tile, q), scale=scale
        )
        return out[..., :head], lse

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward`."""
        sizes = saved.q.shape[-1], k.shape[-1], v.shape[-1]
        q, out, grad, k, v = (
            _rows_contiguous(x, max(sizes)) for x in (saved.q, saved.out, saved.grad_out, k, v)
        )
        if q.dtype.itemsize == 2 and slow_in_half(q.shape[2], k.shape[2]):
            q, out, grad, k, v = (x.float() for x in (q, out, grad, k, v))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad,
            q,
            k,
            v,
            out,
            saved.lse,
            0.0,
            tile.causal,
            attn_mask=additive(tile, q),
            scale=scale,
        )
        dq, dk, dv = (x[..., :size] for x, size in zip(grads, sizes, strict=True))
        return dq, dk, dv


def _rows_contiguous(x: Tensor, size: int) -> Tensor:
    """`x` with a last dimension of `size`, zeros behind, whose elements adjoin."""
    if x.shape[-1] < size:
        return F.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
