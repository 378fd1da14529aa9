"""Attention over a whole sequence on one process, written out in double: what everybody owes.

Legend: B batch, H query heads, Hk key heads, S positions (dummies included), D head size.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.mask import Mask
from tests._harness.simulate import dense


class Answer(NamedTuple):
    """Output `[B, H, S, D]`, LSE `[B, H, S]` and gradients in the shapes of the inputs.

    A query without visible key has output 0, LSE -inf and no gradient.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@lru_cache(maxsize=1024)
def visible(mask: Mask, batch: int, q_size: int, kv_size: int) -> Tensor:
    """What `Mask.visible` says, pair by pair: bool `[batch, 1, q_size, kv_size]`; a constant."""
    seen = dense(mask, (batch, q_size, kv_size))
    return torch.from_numpy(seen.copy()).unsqueeze(1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, mask: Mask, *, scale: float | None = None
) -> Answer:
    """Softmax attention and its gradients in double, whatever the dtype of the inputs.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, Hk, Sk, D]`, `H` a multiple of `Hk`.
        v: `[B, Hk, Sk, Dv]`.
        grad_out: `[B, H, S, Dv]`.
        mask: who sees whom; positions past its lengths are dummies.
        scale: factor on the scores, `1 / sqrt(D)` where None.
    """
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(repeats, 1) for x in inputs[1:]]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    hidden = ~visible(mask, q.shape[0], q.shape[2], k.shape[2])
    scores = (inputs[0] @ wide[0].mT * factor).masked_fill(hidden, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(1)
    weights = (scores - highest.masked_fill(highest == float("-inf"), 0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ wide[1] / total.masked_fill(total == 0, 1)
    grads = torch.autograd.grad(out, inputs, grad_out.double())
    return Answer(out.detach(), scores.detach().logsumexp(-1), *grads)


def single_device(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, mask: Mask, *, scale: float | None = None
) -> Answer:
    """What torch's own kernel of the same dtype gives for the whole sequence: the yardstick.

    Returns:
        The names of `Answer`, in the dtype of the inputs; `lse` in float for half precision.
    """
    q, k, v = inputs = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    seen = visible(mask, q.shape[0], q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    grads = torch.autograd.grad(out, inputs, grad_out)
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    lse: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *(x.detach() for x in inputs), attn_mask=bias, scale=scale
    )[1]
    # The kernel says 0 for rows that see nothing.
    lse = lse.masked_fill(~seen.any(-1), float("-inf"))
    return Answer(out.detach(), lse, *grads)
