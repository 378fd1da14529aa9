"""CPU implementations of torch's CUDA attention operators, with their checks and their quirks.

They are registered with torch's dispatcher under the operators' own names, so that the kernels of
the package run unchanged on CPU tensors and every call passes the schema of the installed torch.
What the CUDA sources require of strides, sizes and paddings is asserted; what they compute wrongly
when a call is careless, they compute wrongly here as well.

Legend: H query heads, Hk key heads, N query tokens, M key tokens, D head size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.kernels.cuda import ALIGNMENT

Triple = tuple[Tensor, Tensor, Tensor]


def _state(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output in the dtype of `q` and LSE; `[..., S, D]` with equal heads, `bias` `[..., S, K]`."""
    scores = _state(q) @ _state(k).mT * scale + bias
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ _state(v)).to(q.dtype), lse


def _differentiate(grad: Tensor, saved: Triple, rows: Triple, bias: Tensor, scale: float) -> Triple:
    """dq, dk, dv in the dtype of `q`; `saved` q, out and lse, `rows` k, v and unused."""
    (q, out, lse), (k, v, _) = saved, rows
    p = (_state(q) @ _state(k).mT * scale + bias - lse.unsqueeze(-1)).exp()
    grad, delta = _state(grad), (_state(grad) * _state(out)).sum(-1, keepdim=True)
    ds = p * (grad @ _state(v).mT - delta) * scale
    found = ds @ _state(k), ds.mT @ _state(q), p.mT @ grad
    return tuple(x.to(q.dtype) for x in found)  # type: ignore[return-value]


def _check_varlen(tensors: tuple[Tensor, ...], cum_q: Tensor, cum_k: Tensor) -> None:
    size = tensors[0].shape[-1]
    assert size % 8 == 0
    assert size <= 256
    for x in tensors:
        assert x.ndim == 3
        assert x.shape[-1] == size
        assert x.stride(-1) == 1
        assert not any(step % ALIGNMENT for step in (*x.stride()[:-1], x.storage_offset()))
    for x in (cum_q, cum_k):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    assert cum_q.shape == cum_k.shape
    assert tensors[0].shape[0] == cum_q[-1]
    assert tensors[1].shape[0] == cum_k[-1]


def _window_bias(
    n: int, m: int, max_k: int, causal: bool, left: int | None, right: int | None
) -> Tensor:
    """What the kernel makes of its window; a window as wide as `max_k` counts as none."""
    left, right = -1 if left is None else left, -1 if right is None else right
    if causal:
        right = 0
    left, right = -1 if left >= max_k else left, -1 if right >= max_k else right
    if left < 0 <= right:
        left = max_k
    if right < 0 <= left:
        right = max_k
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden = (distance < -left) | (distance > right)
    return torch.zeros(n, m).masked_fill_(hidden, float("-inf"))


def _sequences(cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[Any, Any]]:
    for (a, b), (c, d) in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True):
        assert 0 < b - a <= max_q
        assert 0 < d - c <= max_k
        yield (a, b), (c, d)


def flash_forward(  # noqa: PLR0913  (torch's own)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens `[N, H, D]`; the LSE is `[H, N]`."""
    assert not return_debug_mask
    assert dropout_p == 0
    assert scale is not None
    assert not any(x is not None for x in unused.values())
    _check_varlen((query, key, value), cum_seq_q, cum_seq_k)
    repeats = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], query.shape[0], dtype=_state(query).dtype)
    for (a, b), (c, d) in _sequences(cum_seq_q, cum_seq_k, max_q, max_k):
        bias = _window_bias(b - a, d - c, max_k, is_causal, window_size_left, window_size_right)
        k, v = (x[c:d].repeat_interleave(repeats, 1).transpose(0, 1) for x in (key, value))
        part, lse[:, a:b] = _attend(query[a:b].transpose(0, 1), k, v, bias, scale)
        out[a:b] = part.transpose(0, 1)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, *state, query.new_empty(0)


def flash_backward(  # noqa: PLR0913  (torch's own)
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Triple:
    """Gradients in the dtypes of the inputs; those of key heads are summed in that dtype."""
    assert dropout_p == 0
    assert scale is not None
    assert logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], query.shape[0])
    assert grad_out.dtype == out.dtype == query.dtype
    _check_varlen((query, key, value), cum_seq_q, cum_seq_k)
    _check_varlen((out.contiguous(), key, grad_out.contiguous()), cum_seq_q, cum_seq_k)
    heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    for (a, b), (c, d) in _sequences(cum_seq_q, cum_seq_k, max_q, max_k):
        bias = _window_bias(b - a, d - c, max_k, is_causal, window_size_left, window_size_right)
        q, o, g = (x[a:b].transpose(0, 1) for x in (query, out, grad_out))
        k, v = (x[c:d].repeat_interleave(repeats, 1).transpose(0, 1) for x in (key, value))
        found = _differentiate(g, (q, o, logsumexp[:, a:b]), (k, v, v), bias, scale)
        dq[a:b] = found[0].transpose(0, 1)
        for total, part in zip((dk, dv), found[1:], strict=True):
            total[c:d] = part.unflatten(0, (heads, repeats)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _check_block(q: Tensor, *others: Tensor) -> None:
    for x in (q, *others):
        assert x.shape[:2] == q.shape[:2]
        assert x.shape[-1] == q.shape[-1]
        assert x.shape[-1] % 8 == 0
        assert x.stride(-1) == 1
        assert not any(step % ALIGNMENT for step in (*x.stride()[:-1], x.storage_offset()))


def _block_bias(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """The additive mask of a block; causality is aligned at the top left."""
    n, m = q.shape[2], k.shape[2]
    if bias is None:
        hidden = torch.ones(n, m, dtype=torch.bool).triu_(1) if causal else torch.zeros(1).bool()
        return torch.zeros(n, m).masked_fill_(hidden, float("-inf"))
    assert not causal
    assert bias.shape == (*q.shape[:2], n, m)
    assert bias.dtype == q.dtype
    assert bias.stride(3) == 1
    assert bias.stride(2) % 16 == 0
    return bias


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The LSE is `[B, H, ceil(S / 32) * 32]` with inf behind the last row."""
    assert compute_log_sumexp
    assert dropout_p == 0
    assert scale is not None
    _check_block(query, key, value)
    bias = _block_bias(query, key, attn_bias, is_causal)
    out, lse = _attend(query, key, value, bias, scale)
    n = lse.shape[2]
    padded = lse.new_full((*lse.shape[:2], math.ceil(n / 32) * 32), float("inf"))
    padded[:, :, :n] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, seed, seed.clone()


def efficient_backward(  # noqa: PLR0913  (torch's own)
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Reads `out` as if it lay in memory as `[B, S, H, D]` without gaps, whatever its stride."""
    assert dropout_p == 0
    assert scale is not None
    assert list(grad_input_mask) == [True, True, True, False]
    _check_block(query, key, value)
    heads, n, size = query.shape[1:]
    assert logsumexp.shape == (*query.shape[:2], math.ceil(n / 32) * 32)
    assert logsumexp.stride(1) % 8 == 0
    assert logsumexp[:, :, n:].isposinf().all()
    step = out.stride()[:2]
    read = out.as_strided(out.shape, (*step, heads * size, 1), out.storage_offset())
    bias = _block_bias(query, key, attn_bias, is_causal)
    saved = (query, read, logsumexp[:, :, :n])
    return *_differentiate(grad_out_, saved, (key, value, value), bias, scale), None


def cudnn_forward(  # noqa: PLR0913  (torch's own)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The LSE is `[B, H, S, 1]`."""
    assert compute_log_sumexp
    assert dropout_p == 0
    assert scale is not None
    assert not return_debug_mask
    assert min(query.shape[2], key.shape[2]) > 1
    _check_block(query, key, value)
    out, lse = _attend(query, key, value, _block_bias(query, key, attn_bias, is_causal), scale)
    seed = torch.zeros((), dtype=torch.int64)
    none = torch.zeros(0)
    sizes = query.shape[2], key.shape[2]
    return out, lse.unsqueeze(-1), none, none.clone(), *sizes, seed, seed.clone(), none.clone()


def cudnn_backward(  # noqa: PLR0913  (torch's own)
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Triple:
    """Takes the LSE in the shape that the forward gives."""
    assert dropout_p == 0
    assert scale is not None
    assert (cum_seq_q, cum_seq_k) == (None, None)
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert min(max_q, max_k) > 1
    _check_block(query, key, value, out, grad_out)
    assert logsumexp.shape == (*query.shape[:3], 1)
    assert logsumexp.is_contiguous()
    saved = (query, out, logsumexp.squeeze(-1))
    bias = _block_bias(query, key, attn_bias, is_causal)
    return _differentiate(grad_out, saved, (key, value, value), bias, scale)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
"""By name in `torch.ops.aten`."""


class Call(NamedTuple):
    """One call of an operator."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def on_cpu() -> Iterator[list[Call]]:
    """Within it the operators take CPU tensors; their calls are noted."""
    calls: list[Call] = []
    library = torch.library.Library("aten", "IMPL", "CPU")

    def noted(name: str) -> Callable[..., Any]:
        def operator(*args: Any, **kwargs: Any) -> Any:
            calls.append(Call(name, args, kwargs))
            return OPERATORS[name](*args, **kwargs)

        return operator

    try:
        for name in OPERATORS:
            library.impl(name, noted(name))
        yield calls
    finally:
        library._destroy()
