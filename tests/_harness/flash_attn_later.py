"""Stand-ins for the packages flash-attn 3 and 4 on CPUs: their functions, in plain maths.

Names, arguments and defaults are those that the packages document; `SIGNATURES` writes them down,
and a test compares them where a real package is installed.

Legend: B batch, S rows, N tokens of all sequences, H query heads, K key heads, D head size.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

THIRD, FOURTH = "flash_attn_interface", "flash_attn.cute.interface"

_DESCALE = "q_descale=None, k_descale=None, v_descale=None"
_OLD = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_END = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_NEW = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, "
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None"
)
SIGNATURES = {
    THIRD: {
        "flash_attn_func": (
            f"(q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALE}, {_OLD}, {_END})"
        ),
        "flash_attn_varlen_func": (
            "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            "seqused_k=None, softmax_scale=None, causal=False, qv=None, "
            f"{_DESCALE}, {_OLD}, {_END})"
        ),
        "flash_attn_qkvpacked_func": (
            f"(qkv, softmax_scale=None, causal=False, {_DESCALE}, {_OLD}, deterministic=False, "
            "num_heads_q=None, sm_margin=0, return_attn_probs=False)"
        ),
        "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None)",
    },
    FOURTH: {
        "flash_attn_func": (
            f"(q, k, v, qv=None, gather_kv_indices=None, {_NEW}, aux_tensors=None, "
            "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, "
            "return_lse=False)"
        ),
        "flash_attn_varlen_func": (
            "(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
            f"gather_kv_indices=None, page_table=None, {_NEW}, block_sparse_tensors=None, "
            "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, "
            "seqlen_k_per_split=None, disable_scheduler_metadata=False)"
        ),
    },
}
"""Functions by module, with their arguments; that over a cache shortened."""


def _attend(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output `[S, H, D]` and LSE `[H, S]` of one sequence, aligned bottom right."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scale = call["softmax_scale"] or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if call["softcap"]:
        scores = torch.tanh(scores / call["softcap"]) * call["softcap"]
    n, m = scores.shape[1:]
    distance = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    left, right = (-1 if side is None else side for side in call["window_size"])
    right = 0 if call["causal"] else right
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = call.get("learnable_sink")
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(-1, n, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :m]
    return (weights @ v).transpose(0, 1), scores.logsumexp(-1)


def _compute(call: dict[str, Any]) -> Any:
    if "qkv" in call:
        qkv, heads = call["qkv"], call["num_heads_q"]
        k_heads = 0 if heads is None else (qkv.shape[2] - heads) // 2
        q, k, v = qkv.unbind(2) if heads is None else qkv.split([heads, k_heads, k_heads], 2)
    else:
        q, k, v = (call[name] for name in "qkv")
    if call.get("cu_seqlens_q") is not None:
        edges = (list(pairwise(call[f"cu_seqlens_{name}"].tolist())) for name in "qk")
        parts = [
            _attend(q[a:b], k[c:d], v[c:d], call) for (a, b), (c, d) in zip(*edges, strict=True)
        ]
        out, lse = (torch.cat([part[i] for part in parts], i) for i in (0, 1))
    else:
        parts = [_attend(*rows, call) for rows in zip(q, k, v, strict=True)]
        out, lse = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    asked = call.get("return_attn_probs")
    return (out, lse) if asked or "return_lse" in call else out


def _function(name: str, signature: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"_compute": _compute}
    exec(f"def {name}{signature}: return _compute(dict(locals()))", space)
    found: Callable[..., Any] = space[name]
    return found


@contextmanager
def installed() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Within it both packages can be imported; gives their modules with the functions."""
    names = ("flash_attn", "flash_attn.cute")
    parents = [ModuleType(name) for name in names if name not in sys.modules]
    modules = ModuleType(THIRD), ModuleType(FOURTH)
    for module in parents:
        module.__path__ = []
    for module in modules:
        for name, signature in SIGNATURES[module.__name__].items():
            setattr(module, name, _function(name, signature))
    everything = {x.__name__: x for x in (*parents, *modules)}
    before = {name: sys.modules.get(name) for name in everything}
    sys.modules.update(everything)
    try:
        yield modules
    finally:
        for name, found in before.items():
            if found is None:
                del sys.modules[name]
            else:
                sys.modules[name] = found
