"""`flex_attention` of torch on CUDA, for functions that hide keys; by public functions alone.

Legend: B batch, H query heads, n queries and m keys of a block, D head size.

[Note: gradients of a block] A block is computed again, with its own output and LSE, `out_i` and
`lse_i`, and differentiated with `exp(lse_i - lse) * dO` for the output and
`exp(lse_i - lse) * rowsum(dO * (out_i - out))` for the LSE. That is the block's part of the
gradients of attention over all keys, whose output and LSE are `out` and `lse`.

[Note: apart] Within an operator torch records nothing for a backward, whatever is compiled there.
A thread of its own begins without that state.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from lightning_cp.context import SLOT
from lightning_cp.kernels.base import BlockKernel, Saved
from lightning_cp.kernels.cuda import HALF, too_old, unfit
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.kernels.scores import Scores
from lightning_cp.kernels.terms import positions
from lightning_cp.kernels.visible import blocks
from lightning_cp.mask import MaskMod
from lightning_cp.plan import Tile

T = TypeVar("T")

SMALLEST = 16
"""Smallest head size that its compiled code can take."""

ROWS = 2048
"""The most queries and keys of a block, for all of which its function is evaluated."""


class Attend:
    """Differentiable attention over all keys that a function shows.

    Args:
        backend: compiler of `flex_attention`; None leaves that to it.
    """

    def __init__(self, backend: str | None = "inductor") -> None:
        self._backend = backend

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self._backend is None:
            return flex_attention
        compiled: Callable[..., Any] = torch.compile(
            flex_attention, dynamic=True, backend=self._backend
        )
        return compiled

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask_mod: MaskMod, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output `[B, H, n, Dv]` and LSE `[B, H, n]`, natural logarithm.

        Args:
            q: `[B, H, n, D]`.
            k: `[B, Hk, m, D]`.
            v: `[B, Hk, m, Dv]`.
            mask_mod: of rows of these tensors.
            scale: factor on the scores.
        """
        batch, heads, n = q.shape[:3]
        with SLOT.suspend():
            mask = create_block_mask(mask_mod, batch, heads, n, k.shape[2], device=q.device)
            asked = AuxRequest(lse=True)
            out, aux = self._function(
                q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=asked
            )
        return out, aux.lse


class Flex(BlockKernel):
    """Attention of blocks with a `mask_mod`; see the notes of the module.

    Args:
        attend: computes a block.
    """

    supports = frozenset({"mask_mod"})

    def __init__(self, attend: Callable[..., tuple[Tensor, Tensor]] | None = None) -> None:
        self._attend: Callable[..., tuple[Tensor, Tensor]] = attend or Attend()

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, (*HALF, torch.float32)):
            return reason
        if (size := min(q.shape[-1], v.shape[-1])) < SMALLEST:
            return f"takes heads of at least {SMALLEST}, got {size}"
        return too_old(q.device, (8, 0))

    def lacks(self, scores: Scores) -> str | None:
        """Others are faster without a function."""
        if scores.mask_mod is None:
            return "is for calls with a mask_mod"
        return super().lacks(scores)

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """Blocks of bounded size."""
        return blocks(tile, ROWS, ROWS)

    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.block`."""

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return self._attend(q, k, v, self._shown(tile, q, k), scale)

        return _apart(run, q.device)

    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.block_backward` and the notes of the module."""

        def run() -> tuple[Tensor, Tensor, Tensor]:
            q = saved.q
            rows = tuple(x.detach().requires_grad_() for x in (q, k, v))
            out, lse = self._attend(*rows, self._shown(tile, q, k), scale)
            with torch.no_grad():
                dtype = state_dtype(q.dtype)
                weight = (lse - saved.lse).exp().masked_fill(lse == float("-inf"), 0).to(dtype)
                grad = weight.unsqueeze(-1) * saved.grad_out
                of_lse = (grad * (out.to(dtype) - saved.out)).sum(-1)
            dq, dk, dv = torch.autograd.grad(
                (out, lse), rows, (grad.to(out.dtype), of_lse.to(lse.dtype))
            )
            return dq, dk, dv

        return _apart(run, saved.q.device)

    def _shown(self, tile: Tile, q: Tensor, k: Tensor) -> MaskMod:
        """The function of the call, for rows of a block.

        Everything that differs between blocks is in tensors, so that they share compiled code.
        """
        mod = self.scores.mask_mod
        assert mod is not None  # invariant: see `lacks`
        n, m = q.shape[2], k.shape[2]
        low, high = tile.band or (-n, m - n if tile.causal else m)
        numbers = torch.tensor([tile.row or 0, self.scores.first_head, low, high]).to(q.device)
        queries = positions(self.scores.queries, tile.q, q.device)
        keys = positions(self.scores.keys, tile.k, q.device)

        def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = (j - i >= numbers[2]) & (j - i <= numbers[3])
            found: Tensor = mod(b + numbers[0], h + numbers[1], queries[i], keys[j])
            return near & found

        return shown


def _apart(call: Callable[[], T], device: torch.device) -> T:
    """What a call returns in a thread of its own, on this one's stream; see [Note: apart]."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> T:
        if stream is None:
            return call()
        with torch.cuda.stream(stream):
            return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
