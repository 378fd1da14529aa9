"""Flash attention of the package flash-attn 3, on Hopper: all tiles of a round in a few calls.

[Note: operators of version 3] `flash_attn_3::_flash_attn_forward` and `_flash_attn_backward`, which
`flash_attn_interface` registers, take cumulative lengths, windows of -1 for none, soft caps and
fewer key heads, as those of version 2 do; see `lightning_cp.kernels.flash_attn`. They have neither
slopes nor dropout. The LSE is `[H, N]`, float; the gradients are written into tensors that the
caller gives. Versions of the package that register other operators are not used.
"""

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.flash import Call
from lightning_cp.kernels.flash_attn import FlashAttn, registered, window

MADE_FOR = 9
"""Major compute capability of the devices that it is made for."""


class FlashAttn3(FlashAttn):
    """The operators of flash-attn 3; see the note of the module."""

    def _missing(self, device: torch.device) -> str | None:
        if not registered("flash_attn_interface", "flash_attn_3::_flash_attn_forward"):
            return "needs the package flash-attn 3 with registered operators, not installed"
        major, minor = torch.cuda.get_device_capability(device)
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
