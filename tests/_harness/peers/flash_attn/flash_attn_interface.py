"""Functions of flash_attn 2.7 with its arguments and shapes, on torch's CPU kernel.

Legend: N tokens of all documents, H heads, D head size. Layouts are those of the package:
`q, k, v [N, H, D]`, `softmax_lse [H, N]` in at least float32.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """Output and LSE of every document."""
    _plain(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=wide)
    for queries, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        found, own = _forward(
            *(_headed(x) for x in (q[queries], k[keys], v[keys])), 0.0, causal, scale=softmax_scale
        )
        out[queries] = found[0].transpose(0, 1)
        lse[:, queries] = own[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """Gradients of every document, written into `dq`, `dk` and `dv`."""
    _plain(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    for queries, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        headed = [_headed(x) for x in (dout[queries], q[queries], k[keys], v[keys], out[queries])]
        lse = softmax_lse[:, queries].transpose(0, 1).contiguous().transpose(0, 1)[None]
        found = _backward(*headed, lse, 0.0, causal, scale=softmax_scale)
        for into, own, grad in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
            into[own] = grad[0].transpose(0, 1)


def _unused(*args: Any, **options: Any) -> Any:
    """What ring-flash-attn imports and the benchmark does not call."""
    raise NotImplementedError("this stand-in has only the functions for packed documents")


_flash_attn_forward = _flash_attn_backward = flash_attn_func = _unused


def _headed(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _documents(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of every document that has any."""
    for (start, stop), (first, last) in zip(
        pairwise(q.tolist()), pairwise(k.tolist()), strict=True
    ):
        if start < stop and first < last:
            yield slice(start, stop), slice(first, last)


def _plain(dropout: float, window: tuple[int, int], softcap: float, slopes: Tensor | None) -> None:
    if dropout or softcap or slopes is not None or max(window) >= 0:
        raise NotImplementedError("this stand-in has neither dropout nor terms nor windows")
