"""Functions of flash-attn 3 (`flash_attn_interface`) and 4 (`flash_attn.cute`) in a context.

Legend: B batch, S local tokens, N = B * S, H query heads, K key heads, D head size.

What they have in common: rows `[B, S, H, D]`, or `[N, H, D]` with cumulative lengths; the LSE is
`[B, H, S]` or `[H, N]`. Version 3 gives it where asked for, without a gradient; version 4 always,
with one, and takes sinks.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention import attention, keeping
from lightning_cp.context import Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.calls import Arguments, Function, swapped, without_gradient
from lightning_cp.swap.flash_attn import check_alignment, heads_first
from lightning_cp.swap.lengths import Lengths

COMPILED = (
    "flash-attn 3 and 4 in one graph with other code (fullgraph=True) are not supported under "
    "context parallelism; compile without fullgraph, and the call stays out of the graph"
)
UNDERSTOOD = frozenset(
    (
        *("q", "k", "v", "qkv", "num_heads_q", "cu_seqlens_q", "cu_seqlens_k"),
        *("softmax_scale", "causal", "window_size", "softcap", "learnable_sink"),
        *("deterministic", "return_attn_probs", "return_lse"),
    )
)
HINTS = frozenset(
    (
        *("max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "num_splits", "pack_gqa", "sm_margin"),
        *("scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata"),
    )
)
"""Arguments that change the speed alone."""

UNKNOWN = {
    "qv": "a second product of queries, with values",
    "q_descale": "queries in 8 bits",
    "k_descale": "keys in 8 bits",
    "v_descale": "values in 8 bits",
    "attention_chunk": "chunks, for which there is lightning_cp.attend(chunk=...),",
    "seqused_q": "queries that are not used",
    "seqused_k": "keys that are not used",
    "page_table": "a paged cache of keys",
    "gather_kv_indices": "a choice of keys by index",
    "score_mod": "a function of scores",
    "mask_mod": "a mask function for CUDA, for which there is lightning_cp.attend(mask_mod=...),",
    "block_sparse_tensors": "a choice of blocks",
}
"""Arguments that change the result, and what they are; so may those that are on no list."""


def later(original: Function) -> Function:
    """The replacement of an attention function of version 3 or 4, with the same arguments.

    Args:
        original: that of the package.

    Raises:
        RefusedError: from a call, for arguments that change the result and are not `UNDERSTOOD`,
            lengths that are not those of the batch's documents, and what attention refuses.
    """
    parameters, lengths = signature(original).parameters, Lengths()
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    fourth = "return_lse" in parameters

    def lacks(call: Arguments) -> str | None:
        return _lacks(call, defaults)

    def compute(context: Context, call: Arguments) -> Any:
        out, lse = _attend(context, lengths, call)
        if fourth:
            return out, without_gradient(lse)
        return (out, lse.detach()) if call["return_attn_probs"] else out

    return swapped(original, compute, lacks, COMPILED)


def _lacks(call: Arguments, defaults: Mapping[str, Any]) -> str | None:
    for name, value in call.items():
        if name in UNDERSTOOD | HINTS or value is defaults[name] or _same(value, defaults[name]):
            continue
        what = UNKNOWN.get(name, "an argument that is not known")
        return f"{what} ({name}) is not supported under context parallelism; leave it out"
    if call["deterministic"] and not torch.are_deterministic_algorithms_enabled():
        return (
            "deterministic=True of one call is not supported under context parallelism; say "
            "torch.use_deterministic_algorithms(True) for all"
        )
    given = [call.get(name) is not None for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if any(given) and not all(given):
        return "cumulative lengths of queries and keys must be given both or not at all"
    return None


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and bool(value == default)


def _attend(context: Context, lengths: Lengths, call: Arguments) -> tuple[Tensor, Tensor]:
    """Output and LSE in the shapes of the package."""
    q, k, v = _unpacked(call)
    if q.dtype.itemsize < 2:
        raise RefusedError(
            f"attention in 8 bits ({q.dtype}) is not supported under context parallelism; pass "
            f"torch.bfloat16"
        )
    edges = [call.get(f"cu_seqlens_{name}") for name in "qk"]
    packed = [x for x in edges if x is not None]
    if packed:
        rows = [
            lengths.check(context, x, edge, is_causal=bool(call["causal"]))
            for x, edge in zip((q, k), packed, strict=True)
        ]
        batches = (rows[0].batch, rows[1].batch, rows[1].batch)
        q, k, v = (heads_first(x, batch) for x, batch in zip((q, k, v), batches, strict=True))
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal, before, after = _window(call)
    if causal or max(before, after) >= 0:
        check_alignment(context, q, k)
    scale = q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
    out, lse, *_ = attention(
        *(q, k, v, causal, scale, before, after),
        softcap=call["softcap"] or 0.0,
        sinks=call.get("learnable_sink"),
        keep=keeping(q, k, v, call.get("learnable_sink")),
    )
    if packed:
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return out.transpose(1, 2), lse


def _unpacked(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call, which may come in one tensor `[B, S, ..., D]`."""
    if "qkv" not in call:
        return call["q"], call["k"], call["v"]
    qkv = call["qkv"]
    if qkv.ndim == 5:
        q, k, v = qkv.unbind(-3)
        return q, k, v
    heads = call["num_heads_q"]
    q, k, v = qkv.split([heads, *[(qkv.shape[2] - heads) // 2] * 2], dim=-2)
    return q, k, v


def _window(call: Arguments) -> tuple[bool, int, int]:
    """Causality, and the window before and after, -1 for no limit.

    Version 4 takes None for no limit, and a window that is empty for none.
    """
    causal, (before, after) = bool(call["causal"]), call["window_size"]
    if "return_lse" not in call:
        return causal, max(before, -1), max(after, -1)
    after = 0 if causal else after
    if before is not None and after is not None and before + after < 0:
        return causal, -1, -1
    if min(side for side in (before, after, 0) if side is not None) < 0:
        raise RefusedError(
            f"window_size={call['window_size']} leaves out the query's own position, which is not "
            f"supported under context parallelism; pass sides of at least 0, or None"
        )
    return causal, -1 if before is None else before, -1 if after is None else after


THIRD: dict[str, Callable[[Function], Function]] = dict.fromkeys(
    ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"), later
)
FOURTH = dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), later)
"""Functions of both versions, each with what makes its replacement."""
