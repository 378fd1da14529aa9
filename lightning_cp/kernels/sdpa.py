"""The fused attention kernel for CPUs that ships with torch."""

import torch
from torch import Tensor

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
    """

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if q.device.type != "cpu":
            return f"has no path for {q.device.type} tensors"
        if q.shape[-1] != v.shape[-1]:
            return f"needs keys and values of one size, got {q.shape[-1]} and {v.shape[-1]}"
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """A full block left of a square causal one, or a few rows; see [Note: CPU flash kernel]."""
        return square(tile, BANDED)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`; the output is in the dtype of `q`."""
        q, k, v = (_rows_contiguous(x) for x in (q, k, v))
        found: tuple[Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                q, k, v, 0.0, tile.causal, attn_mask=additive(tile, q), scale=scale
            )
        )
        return found

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward`."""
        q, out, grad, k, v = (
            _rows_contiguous(x) for x in (saved.q, saved.out, saved.grad_out, k, v)
        )
        if q.dtype.itemsize == 2 and slow_in_half(q.shape[2], k.shape[2]):
            q, out, grad, k, v = (x.float() for x in (q, out, grad, k, v))
        found: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
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
        )
        return found


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
