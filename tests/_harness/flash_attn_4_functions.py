"""A stand-in for the functions of flash-attn 4 that its kernel calls, on CPUs.

Names, arguments and defaults are those of the package; the maths is that of the stand-in for
version 2, whose layouts are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests._harness import flash_attn, flash_attn_later

_LENGTHS = "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None"
_LONGEST = "max_seqlen_q=None, max_seqlen_k=None"
_WINDOW = "window_size_left=None, window_size_right=None"
_SHAPE = (
    "m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, "
    "AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False"
)
SIGNATURES = {
    "_flash_attn_fwd": (
        f"(q, k, v, qv=None, {_LENGTHS}, {_LONGEST}, min_seqlen_k=None, page_table=None, "
        f"softmax_scale=None, causal=False, softcap=None, {_WINDOW}, learnable_sink=None, "
        "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, "
        "pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
        "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
        "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False)"
    ),
    "_flash_attn_bwd": (
        "(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        f"{_WINDOW}, {_SHAPE}, {_LENGTHS}, {_LONGEST}, deterministic=False, dq=None, dk=None, "
        "dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, "
        "aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None)"
    ),
}
"""Functions of the module `flash_attn_later.FOURTH`, with their arguments."""

CALLS: list[str] = []
"""Names of the functions that were called."""


def _compute(name: str, call: dict[str, Any]) -> Any:
    CALLS.append(name)
    sides = {n: -1 if call[n] is None else call[n] for n in call if n.startswith("window_size")}
    assert all(call[n] is None or call[n] >= 0 for n in sides)
    call = call | sides | {"dropout_p": 0.0, "alibi_slopes": None}
    if name == "_flash_attn_fwd":
        assert call["return_lse"]
        out, lse, *_ = flash_attn.COMPUTE["_flash_attn_varlen_forward"](call)
        return out, lse, None, None
    grads = {f"d{n}": torch.empty_like(call[n]) for n in "qkv"}
    flash_attn.COMPUTE["_flash_attn_varlen_backward"](call | grads | {"softmax_lse": call["lse"]})
    return tuple(grads.values())


@contextmanager
def installed(signatures: dict[str, str] = SIGNATURES) -> Iterator[None]:
    """Within it the package can be imported, with these functions that take CPU tensors."""
    CALLS.clear()
    with flash_attn_later.installed() as (_, module):
        for name, signature in signatures.items():
            space: dict[str, Any] = {"_compute": _compute}
            exec(f"def {name}{signature}: return _compute('{name}', dict(locals()))", space)
            setattr(module, name, space[name])
        yield
