"""Fused attention on CUDA through torch's own operators, one block at a time.

[Note: fused operators] Both take a causal block aligned at the top left, so tiles are split as for
the CPU kernel, and as many key heads as query heads, so keys and values are repeated and their
gradients summed, in float. A band becomes an additive mask in the dtype of the queries. A backward
takes the output and LSE over all keys with one block of keys. Random state is read with dropout
only.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_cp.kernels.base import BlockKernel, Saved
from lightning_cp.kernels.cuda import HALF, aligned, too_old, unfit, width
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.visible import additive
from lightning_cp.plan import Tile
from lightning_cp.plan.memory import BANDED
from lightning_cp.plan.rounds import square

MASK_ALIGNMENT = 16
"""Elements between the rows of a mask are a multiple of it."""

LSE_ALIGNMENT = 32
"""Rows of an LSE are filled up to a multiple of it by the memory-efficient operator."""

CUDNN_LARGEST = 128
"""Largest head size that cuDNN takes on every device from compute capability 8.0 on."""


class Fused(BlockKernel):
    """What the two operators share: blocks, repeated heads, padded head sizes, masks."""

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """See `square`."""
        return square(tile, BANDED)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`; the output is in the dtype of `q`."""
        size, head = width(q.shape[-1], v.shape[-1]), v.shape[-1]
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        q, k, v = (aligned(x, size) for x in (q, k, v))
        out, lse = self._forward(tile, q, k, v, scale)
        return out[..., :head], lse

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward`; dk and dv are in float where heads were summed."""
        heads, sizes = k.shape[1], (saved.q.shape[-1], k.shape[-1], v.shape[-1])
        size = width(*sizes)
        k, v = (aligned(_repeated(x, saved.q.shape[1]), size) for x in (k, v))
        rows = Saved(
            aligned(saved.q, size),
            aligned(saved.out, size),
            saved.lse,
            aligned(saved.grad_out, size),
        )
        grads = self._backward(tile, rows, k, v, scale)
        dq, dk, dv = (grad[..., :head] for grad, head in zip(grads, sizes, strict=True))
        return dq, _summed(dk, heads), _summed(dv, heads)

    @abstractmethod
    def _forward(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE `[B, H, Sq]` of a block with equal heads and aligned tensors."""

    @abstractmethod
    def _backward(
        self, tile: Tile, rows: Saved, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of a block with equal heads and aligned tensors."""


class Efficient(Fused):
    """`aten::_scaled_dot_product_efficient_attention` and its backward.

    [Note: memory-efficient operator] The LSE is filled up with inf to a multiple of 32 rows, and
    the backward reads it so. The backward takes the output to lie in memory as `[B, S, H, D]`
    without gaps, whatever its strides. The mask has the whole shape `[B, H, Sq, Sk]`, expanded.
    """

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, (torch.float32, *HALF)):
            return reason
        return too_old(q.device, (8, 0)) if q.dtype == torch.bfloat16 else None

    def _forward(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            q, k, v, _expanded(tile, q), True, 0.0, tile.causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def _backward(
        self, tile: Tile, rows: Saved, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, n = rows.q, rows.q.shape[2]
        lse = rows.lse.new_full(
            (*q.shape[:2], -(-n // LSE_ALIGNMENT) * LSE_ALIGNMENT), float("inf")
        )
        lse[:, :, :n] = rows.lse
        out = rows.out.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            rows.grad_out,
            q,
            k,
            v,
            _expanded(tile, q),
            out,
            lse,
            *_no_randomness(q),
            0.0,
            [True, True, True, False],
            tile.causal,
            scale=scale,
        )
        return dq, dk, dv


class Cudnn(Fused):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward.

    [Note: cuDNN operator] The LSE is `[B, H, S, 1]`. cuDNN has no kernels for a single query or a
    single key in every version; such blocks are computed by the reference, whose cost is nothing
    there.
    """

    def __init__(self) -> None:
        self._single = Reference()

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, HALF):
            return reason
        if (size := max(q.shape[-1], v.shape[-1])) > CUDNN_LARGEST:
            return f"takes heads of at most {CUDNN_LARGEST}, got {size}"
        if not torch.backends.cudnn.is_available():
            return "is not part of this build of torch"
        return too_old(q.device, (8, 0))

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block` and [Note: cuDNN operator]."""
        if 1 in (q.shape[2], k.shape[2]):
            return self._single.block(tile, q, k, v, scale=scale)
        return super().block(tile, q, k, v, scale=scale)

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward` and [Note: cuDNN operator]."""
        if 1 in (saved.q.shape[2], k.shape[2]):
            return self._single.block_backward(tile, saved, k, v, scale=scale)
        return super().block_backward(tile, saved, k, v, scale=scale)

    def _forward(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, _expanded(tile, q), True, 0.0, tile.causal, False, scale=scale
        )
        return out, lse.squeeze(-1)

    def _backward(
        self, tile: Tile, rows: Saved, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = rows.q
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            rows.grad_out,
            q,
            k,
            v,
            rows.out,
            rows.lse.contiguous().unsqueeze(-1),
            *_no_randomness(q),
            _expanded(tile, q),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            tile.causal,
            scale=scale,
        )
        return dq, dk, dv


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Key heads repeated to `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """The gradients of repeated heads, summed in float (double for double)."""
    if x.shape[1] == heads:
        return x
    grouped: Tensor = x.unflatten(1, (heads, -1))
    return grouped.sum(2, dtype=torch.promote_types(x.dtype, torch.float32))


def _expanded(tile: Tile, q: Tensor) -> Tensor | None:
    mask = additive(tile, q, align=MASK_ALIGNMENT)
    return None if mask is None else mask.expand(*q.shape[:2], -1, -1)


def _no_randomness(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)
