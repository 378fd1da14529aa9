"""Kernels: attention over one tile, forward and backward, and the merge of partial results.

`KERNELS` names them. A kernel computes on one (query rows, key rows) block and knows nothing of
ranks; `resolve` picks one for the tensors of a call.
"""

from torch import Tensor

from lightning_cp.errors import RefusedError
from lightning_cp.kernels.base import Kernel
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.sdpa import Sdpa

KERNELS: dict[str, Kernel] = {"reference": Reference(), "sdpa": Sdpa()}

__all__ = ["KERNELS", "Kernel", "resolve"]


def resolve(name: str, q: Tensor, v: Tensor) -> Kernel:
    """The kernel for a call: the named one, or with "auto" the fastest that supports it.

    Raises:
        RefusedError: if the named kernel, or with "auto" every fast kernel, lacks a capability.
    """
    chosen = "sdpa" if name == "auto" else name
    reason = KERNELS[chosen].rejects(q, v)
    if reason:
        raise RefusedError(
            f"attention_backend={name!r}: the {chosen} kernel {reason}; "
            f"attention_backend='reference' computes anything, with memory quadratic in the length"
        )
    return KERNELS[chosen]
