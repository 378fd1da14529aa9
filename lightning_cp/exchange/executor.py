"""The loop that runs a plan, forward and backward. It owns no decisions.

Legend: B batch, H query heads, Hk key heads, S local queries, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_cp.exchange.transfers import Homing, rounds
from lightning_cp.kernels import Kernel
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import merge_, state_dtype
from lightning_cp.plan import Plan, Tile
from lightning_cp.spans import Span, intersection, union


def token_major(q: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """An empty `[B, H, S, D]` stored as `[B, S, H, D]`, as torch's own kernels return it."""
    batch, heads, size, _ = q.shape
    return q.new_empty(batch, size, heads, head_dim, dtype=dtype).transpose(1, 2)


def forward(
    plan: Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, scale: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of the whole group.

    Args:
        plan: this rank's plan.
        kernel: what computes a tile.
        q: local queries `[B, H, S, D]`.
        k: local keys `[B, Hk, Sk, D]`.
        v: local values `[B, Hk, Sk, Dv]`.
        scale: factor on the scores.
        group: process group of the exchange; every rank of it calls.

    Returns:
        Output `[B, H, S, Dv]` in the dtype of `q`, and LSE `[B, H, S]` in float (double for
        double), -inf and output 0 where a query sees no key.
    """
    dtype = state_dtype(q.dtype)
    out = token_major(q, v.shape[-1], dtype).zero_()
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
    written: tuple[Span, ...] = ()
    for step, (k_buffer, v_buffer) in rounds(plan, k, v, group=group):
        for tile in (part for whole in step.tiles for part in kernel.split(whole)):
            part, part_lse = kernel.forward(
                *_cut(tile, q, k_buffer, v_buffer), is_causal=tile.causal, scale=scale
            )
            out_rows, lse_rows = _rows(out, tile.row, tile.q), _rows(lse, tile.row, tile.q)
            if tile.row is None and not intersection(written, (tile.q,)):
                out_rows.copy_(part)
                lse_rows.copy_(part_lse)
            else:
                merge_(out_rows, lse_rows, part, part_lse)
            written = union((*written, tile.q))
    return out.to(q.dtype), lse


def backward(
    plan: Plan, kernel: Kernel, saved: Saved, k: Tensor, v: Tensor, *, scale: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values; keys and values travel again.

    Args:
        plan: the plan of the forward.
        kernel: what computes a tile.
        saved: local queries with the results of the forward and the gradient of the output.
        k: local keys.
        v: local values.
        scale: factor on the scores.
        group: process group of the exchange; every rank of it calls.

    Returns:
        dq, dk, dv in the shapes and dtypes of the inputs. Sums over tiles and ranks are in float
        (double for double) and cast once.
    """
    dtype = state_dtype(saved.q.dtype)
    dq = torch.zeros_like(saved.q, dtype=dtype)
    own = (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
    homing: Homing | None = None
    for index, (step, (k_buffer, v_buffer)) in enumerate(rounds(plan, k, v, group=group)):
        grads = own
        if index:
            grads = (
                k_buffer.new_zeros(k_buffer.shape, dtype=dtype),
                v_buffer.new_zeros(v_buffer.shape, dtype=dtype),
            )
        for tile in (part for whole in step.tiles for part in kernel.split(whole)):
            rows = Saved(*(_rows(x, tile.row, tile.q) for x in saved))
            parts = kernel.backward(
                rows,
                _rows(k_buffer, tile.row, tile.k),
                _rows(v_buffer, tile.row, tile.k),
                is_causal=tile.causal,
                scale=scale,
            )
            for total, span, part in zip(
                (dq, *grads), (tile.q, tile.k, tile.k), parts, strict=True
            ):
                _rows(total, tile.row, span).add_(part)
        if homing is not None:
            homing.add()
        homing = Homing(step, grads, own, group=group) if index else None
    if homing is not None:
        homing.add()
    return dq.to(saved.q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)


def _cut(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _rows(q, tile.row, tile.q),
        _rows(k, tile.row, tile.k),
        _rows(v, tile.row, tile.k),
    )


def _rows(x: Tensor, row: int | None, span: Span) -> Tensor:
    batch = x if row is None else x[row : row + 1]
    return batch[:, :, span[0] : span[1]]
