"""Flash attention of the package flash_attn 2.x, on CUDA: all tiles of a round in a few calls.

[Note: operators of the package] `flash_attn::_flash_attn_varlen_forward` and `_backward` take what
`aten::_flash_attention_forward` takes, see `lightning_cp.kernels.flash`, and soft caps besides. Its
slopes count from the last key of a sequence, which for tiles is another place than the query's own.
Windows of -1 are none; the gradients are written into tensors that the caller gives.
"""

from importlib import import_module

import torch
from torch import Tensor

from lightning_cp.context import SLOT
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.cuda import HALF, too_old, unfit
from lightning_cp.kernels.flash import LARGEST, Call, Flash


class FlashAttn(Flash):
    """The operators of flash_attn; see the note of the module."""

    supports = frozenset({"softcap"})

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, HALF):
            return reason
        if (size := max(q.shape[-1], v.shape[-1])) > LARGEST:
            return f"takes heads of at most {LARGEST}, got {size}"
        return self._missing(q.device)

    def _missing(self, device: torch.device) -> str | None:
        """What the operators need and do not have."""
        if not registered("flash_attn", "flash_attn::_flash_attn_varlen_forward"):
            return "needs the package flash-attn, from 2.7 on, which is not installed"
        return too_old(device, (8, 0))

    def _run(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        with SLOT.suspend():  # else calls within a context would come back here
            out, lse, *_ = torch.ops.flash_attn._flash_attn_varlen_forward.default(
                *(q, k, v, call.cum_q, call.cum_k, call.max_q, call.max_k),
                *(0.0, scale, call.causal, *window(call), self.scores.softcap or 0.0),
            )
        return out, lse

    def _run_backward(
        self, call: Call, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse, grad = saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn._flash_attn_varlen_backward.default(
            *(grad, q, k, v, out, lse, dq, dk, dv),
            *(call.cum_q, call.cum_k, call.max_q, call.max_k),
            *(0.0, scale, call.causal, *window(call), self.scores.softcap or 0.0, None),
            torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def window(call: Call) -> tuple[int, int]:
    """The window of a call as the package takes it."""
    left, right = (-1 if side is None else side for side in (call.left, call.right))
    return left, right


def registered(module: str, operator: str) -> bool:
    """Whether an operator `namespace::name` is there, which importing a module registers."""
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    namespace, _, name = operator.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)
