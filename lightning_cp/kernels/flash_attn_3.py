"""Flash attention of the package flash-attn 3, on Hopper: all tiles of a round in a few calls.

[Note: operators of version 3] `flash_attn_3::_flash_attn_forward` and `_flash_attn_backward`, which
`flash_attn_interface` registers, take cumulative lengths, windows of -1 for none, soft caps and
fewer key heads, as those of version 2 do; see `lightning_cp.kernels.flash_attn`. They have neither
slopes nor dropout. The LSE is `[H, N]`, float; the gradients are written into tensors that the
caller gives. Versions of the package that register other operators are not used.
"""

from importlib import import_module

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.cuda import HALF, unfit
from lightning_cp.kernels.flash import LARGEST, Call
from lightning_cp.kernels.flash_attn import FlashAttn, window

MADE_FOR = 9
"""Major compute capability of the devices that it is made for."""


class FlashAttn3(FlashAttn):
    """The operators of flash-attn 3; see the note of the module."""

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, HALF):
            return reason
        if (size := max(q.shape[-1], v.shape[-1])) > LARGEST:
            return f"takes heads of at most {LARGEST}, got {size}"
        if not _is_installed():
            return "needs the package flash-attn 3 with registered operators, not installed"
        major, minor = torch.cuda.get_device_capability(q.device)
        if major != MADE_FOR:
            return f"needs compute capability {MADE_FOR}.x, this device has {major}.{minor}"
        return None

    def _run(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        left, right = window(call)
        out, lse, *_ = torch.ops.flash_attn_3._flash_attn_forward.default(
            *(q, k, v),
            cu_seqlens_q=call.cum_q,
            cu_seqlens_k=call.cum_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=self.scores.softcap or 0.0,
        )
        return out, lse

    def _run_backward(
        self, call: Call, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse, grad = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3._flash_attn_backward.default(
            *(grad, q, k, v, out, lse, call.cum_q, call.cum_k, None, None),
            *(call.max_q, call.max_k, dq, dk, dv),
            *(scale, call.causal, *window(call), self.scores.softcap or 0.0),
            torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _is_installed() -> bool:
    """Whether the operators are there; importing the package registers them."""
    try:
        import_module("flash_attn_interface")
    except (ImportError, OSError):
        return False
    return hasattr(torch.ops.flash_attn_3, "_flash_attn_forward")
