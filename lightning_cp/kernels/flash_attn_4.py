"""Flash attention of the package flash-attn 4, on Hopper and later: see `kernels.flash_attn`.

[Note: functions of version 4] The package registers no operators. Its functions
`flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd` take what those of version 3 do,
by name, with None for no side of a window; the LSE is `[H, N]`, float. Versions whose functions
have other arguments are not used. From compute capability 10 on heads are up to 128; those of 256
have kernels of their own there, which lack soft caps.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.flash import Call
from lightning_cp.kernels.flash_attn import FlashAttn

MADE_FOR = range(9, 12)
"""Major compute capabilities of the devices that both functions are made for."""

NARROW = 128
"""Largest head size on devices after Hopper."""

COMMON = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal"),
    *("softmax_scale", "softcap", "window_size_left", "window_size_right"),
)
TAKEN = {
    "_flash_attn_fwd": (*COMMON, "return_lse"),
    "_flash_attn_bwd": (*COMMON, "out", "dout", "lse", "deterministic", "dlse"),
}
"""What the functions are told, and what those before cumulative lengths on Hopper lack (`dlse`)."""


class FlashAttn4(FlashAttn):
    """The functions of flash-attn 4; see the note of the module."""

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := super().rejects(q, v):
            return reason
        major, _ = torch.cuda.get_device_capability(q.device)
        size = max(q.shape[-1], v.shape[-1])
        if major > MADE_FOR[0] and size > NARROW:
            return f"takes heads of at most {NARROW} on devices of {major}.x, got {size}"
        return None

    def _missing(self, device: torch.device) -> str | None:
        if _functions() is None:
            return (
                "needs the package flash-attn 4, which is not installed, or another version of it"
            )
        major, minor = torch.cuda.get_device_capability(device)
        if major not in MADE_FOR:
            need = f"{MADE_FOR[0]}.x to {MADE_FOR[-1]}.x"
            return f"needs compute capability {need}, this device has {major}.{minor}"
        return None

    def _run(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        forward, _ = _found()
        told = self._told(call, scale)
        out, lse, *_ = forward(q=q, k=k, v=v, return_lse=True, **told)
        return out, lse

    def _run_backward(
        self, call: Call, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse, grad = saved
        _, backward = _found()
        wanted = torch.are_deterministic_algorithms_enabled()
        told = self._told(call, scale)
        dq, dk, dv, *_ = backward(
            q=q, k=k, v=v, out=out, dout=grad, lse=lse, deterministic=wanted, **told
        )
        return dq, dk, dv

    def _told(self, call: Call, scale: float) -> dict[str, Any]:
        left, right = (None if side in (None, -1) else side for side in (call.left, call.right))
        return {
            "cu_seqlens_q": call.cum_q,
            "cu_seqlens_k": call.cum_k,
            "max_seqlen_q": call.max_q,
            "max_seqlen_k": call.max_k,
            "softmax_scale": scale,
            "causal": call.causal,
            "softcap": self.scores.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
        }


Pair = tuple[Callable[..., Any], Callable[..., Any]]


def _functions() -> Pair | None:
    """Forward and backward, where the package has them with what they are told."""
    try:
        module = import_module("flash_attn.cute.interface")
    except (ImportError, OSError):
        return None
    found = [getattr(module, name, None) for name in TAKEN]
    fit = all(map(_takes, found, TAKEN.values()))
    return (found[0], found[1]) if fit else None  # type: ignore[return-value]


@lru_cache(maxsize=8)
def _takes(function: Callable[..., Any] | None, names: tuple[str, ...]) -> bool:
    return function is not None and set(names) <= set(signature(function).parameters)


def _found() -> Pair:
    functions = _functions()
    assert functions is not None  # invariant: the kernel was not passed over
    return functions
