"""The fused attention kernels that ship with torch; here the CPU flash kernel."""

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.plan import Tile

SMALL = 256
"""Below this many rows or keys the half-precision backward is slower than the float one."""


class Sdpa:
    """`aten::_scaled_dot_product_flash_attention_for_cpu` and its backward.

    [Note: CPU flash kernel] `is_causal` is aligned at the top left, so a tile with more keys than
    queries is split into a full and a square block. A row without visible keys would get output 0
    and LSE 0 in place of -inf; tiles have no such rows. The backward accepts the output and LSE
    over all keys together with one block of keys, which makes a sum over blocks exact.
    """

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if q.device.type != "cpu":
            return f"has no path for {q.device.type} tensors yet"
        if q.shape[-1] != v.shape[-1]:
            return f"needs keys and values of one size, got {q.shape[-1]} and {v.shape[-1]}"
        return None

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """A full block left of a square causal one; see [Note: CPU flash kernel]."""
        corner = tile.k[1] - (tile.q[1] - tile.q[0])
        if not tile.causal or corner == tile.k[0]:
            return (tile,)
        return (
            tile._replace(k=(tile.k[0], corner), causal=False),
            tile._replace(k=(corner, tile.k[1])),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`; the output is in the dtype of `q`."""
        q, k, v = (_rows_contiguous(x) for x in (q, k, v))
        found: tuple[Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                q, k, v, 0.0, is_causal, scale=scale
            )
        )
        return found

    def backward(
        self, saved: Saved, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        q, out, grad, k, v = (
            _rows_contiguous(x) for x in (saved.q, saved.out, saved.grad_out, k, v)
        )
        if q.dtype.itemsize == 2 and min(q.shape[2], k.shape[2]) <= SMALL:
            q, out, grad, k, v = (x.float() for x in (q, out, grad, k, v))
        found: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                grad, q, k, v, out, saved.lse, 0.0, is_causal, scale=scale
            )
        )
        return found


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
