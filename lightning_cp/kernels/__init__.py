"""Kernels: attention over tiles, forward and backward, and the merge of partial results.

`KERNELS` names them. A kernel computes (query rows, key rows) of one buffer and knows nothing of
ranks; `choose` picks one for the tensors of a call, and `resolve` makes it for its scores.
"""

from typing import NamedTuple

from torch import Tensor

from lightning_cp.errors import RefusedError
from lightning_cp.kernels.base import Kernel
from lightning_cp.kernels.flash import Flash
from lightning_cp.kernels.flash_attn import FlashAttn
from lightning_cp.kernels.flash_attn_3 import FlashAttn3
from lightning_cp.kernels.flash_attn_4 import FlashAttn4
from lightning_cp.kernels.flex import Flex
from lightning_cp.kernels.fused import Cudnn, Efficient
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.scores import PLAIN, Scores
from lightning_cp.kernels.sdpa import Sdpa

KERNELS: dict[str, Kernel] = {
    "cudnn": Cudnn(),
    "efficient": Efficient(),
    "flash": Flash(),
    "flash_attn": FlashAttn(),
    "flash_attn_3": FlashAttn3(),
    "flash_attn_4": FlashAttn4(),
    "flex": Flex(),
    "reference": Reference(),
    "sdpa": Sdpa(),
}
"""By name; "sdpa" is torch's kernel for CPUs, and as an option the first of `FAMILY` that fits."""

FAMILY = ("sdpa", "flash", "efficient")
"""Torch's fused kernels, in the order in which they are tried: CPU, CUDA in half precision, CUDA
in float."""

AUTO = ("sdpa", "flash", "flash_attn", "efficient")
"""The same with that of flash-attn, for soft caps and builds of torch without flash attention."""

__all__ = ["AUTO", "FAMILY", "KERNELS", "Choice", "Kernel", "choose", "resolve"]


class Choice(NamedTuple):
    """A kernel by name, and why those before it were passed over."""

    name: str
    passed: tuple[str, ...]


def choose(name: str, q: Tensor, v: Tensor, scores: Scores = PLAIN) -> Choice:
    """The kernel for a call.

    The named one; of "auto" and "sdpa" the first fused one that fits, and where the scores have
    terms that none of these computes, with "auto" that of flex attention, or else the reference.

    Raises:
        RefusedError: if the named kernel, or every fast kernel, lacks a capability.
    """
    reasons: list[str] = []
    candidates = {"auto": AUTO, "sdpa": FAMILY}.get(name, (name,))
    if scores.terms and name == "auto":
        candidates = (*candidates, "flex", "reference")
    for candidate in candidates:
        kernel = KERNELS[candidate]
        reason = kernel.rejects(q, v) or kernel.lacks(scores)
        if reason is None:
            return Choice(candidate, tuple(reasons))
        reasons.append(f"the {candidate} kernel {reason}")
    raise RefusedError(
        f"attention_backend={name!r}: {'; '.join(reasons)}; attention_backend='reference' computes "
        f"anything, slowly"
    )


def resolve(name: str, q: Tensor, v: Tensor, scores: Scores = PLAIN) -> Kernel:
    """The kernel for a call, made for its scores; see `choose`."""
    return KERNELS[choose(name, q, v, scores).name].bound(scores)
