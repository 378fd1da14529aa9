"""A stand-in for the registered operators of flash-attn 3, on CPUs.

Their schemas are those that the package's functions have; the maths is that of the stand-in for
version 2, whose layouts are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests._harness import flash_attn, flash_attn_later

_LENGTHS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_LONGEST = "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
_WINDOW = "SymInt window_size_left=-1, SymInt window_size_right=-1"
SCHEMAS = {
    "_flash_attn_forward": (
        "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, "
        f"Tensor? out_=None, {_LENGTHS}, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        f"Tensor? seqused_k=None, {_LONGEST}, Tensor? page_table=None, Tensor? kv_batch_idx=None, "
        "Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
        "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
        f"Tensor? v_descale=None, float? softmax_scale=None, bool causal=False, {_WINDOW}, "
        "SymInt attention_chunk=0, float softcap=0., bool rotary_interleaved=True, "
        "Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? pack_gqa=None, "
        "SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        f"{_LENGTHS}, Tensor? sequed_q=None, Tensor? sequed_k=None, {_LONGEST}, "
        "Tensor(a12!)? dq=None, Tensor(a13!)? dk=None, Tensor(a14!)? dv=None, "
        f"float? softmax_scale=None, bool is_causal=False, {_WINDOW}, float softcap=0., "
        "bool deterministic=False, SymInt sm_margin=0) -> Tensor"
    ),
}
"""Operators of the package, in namespace `flash_attn_3`."""

CALLS: list[str] = []
"""Names of the operators that were called."""


def _operator(name: str) -> Any:
    known = getattr(torch.ops.flash_attn_3, name).default._schema.arguments

    def operator(*args: Any, **kwargs: Any) -> Any:
        defaults = {a.name: a.default_value for a in known if a.has_default_value()}
        call = defaults | dict(zip((a.name for a in known), args, strict=False)) | kwargs
        call |= {"dropout_p": 0.0, "alibi_slopes": None}
        call.setdefault("causal", call.get("is_causal"))
        CALLS.append(name)
        if "backward" in name:
            return flash_attn.COMPUTE["_flash_attn_varlen_backward"](call)
        out, lse, *_ = flash_attn.COMPUTE["_flash_attn_varlen_forward"](call)
        nothing = torch.empty(0)
        return out, lse, nothing, nothing.clone()

    return operator


@contextmanager
def installed() -> Iterator[None]:
    """Within it `flash_attn_interface` can be imported, and its operators take CPU tensors."""
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.flash_attn_3, name):
            torch.library.define(f"flash_attn_3::{name}", schema)
            torch.library.impl(f"flash_attn_3::{name}", "cpu", _operator(name))
    CALLS.clear()
    with flash_attn_later.installed():
        yield
