"""Attention over a whole sequence on one process, written out in double: what everybody owes.

Legend: B batch, H query heads, Hk key heads, S positions (dummies included), D head size.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.kernels.merge import state_dtype
from lightning_cp.mask import Mask
from tests._harness.asked import Asked
from tests._harness.simulate import dense

PLAIN = Asked()


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


def sighted(mask: Mask, shape: tuple[int, ...], asked: Asked) -> Tensor:
    """Which queries of a sequence with itself see a key: bool `[B, H, S]`, of that shape."""
    batch, _, size = shape
    hidden = ~visible(mask, batch, size, size)
    return (~asked.biased(torch.zeros(*shape, size), hidden)[1]).any(-1).expand(shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    asked: Asked = PLAIN,
) -> Answer:
    """Softmax attention and its gradients in double, whatever the dtype of the inputs.

    Args:
        q: `[B, H, S, D]`.
        k: `[B, Hk, S, D]`, `H` a multiple of `Hk`.
        v: `[B, Hk, Sk, Dv]`.
        grad_out: `[B, H, S, Dv]`.
        mask: who sees whom; positions past its lengths are dummies.
        scale: factor on the scores, `1 / sqrt(D)` where None.
        asked: what else scores are made of.
    """
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = _written_out(*inputs, mask=mask, scale=scale, asked=asked)
    grads = torch.autograd.grad(out, inputs, grad_out.double())
    return Answer(out.detach(), lse.detach(), *grads)


def learned(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, mask: Mask, *, scale: float, asked: Asked
) -> dict[str, Tensor]:
    """The gradients of what scores are made of, by name; arguments as those of `attention`."""
    asked = asked.learning(lambda x: x.detach().double().requires_grad_())
    inputs = [x.detach().double() for x in (q, k, v)]
    out, _ = _written_out(*inputs, mask=mask, scale=scale, asked=asked)
    grads = torch.autograd.grad(out, list(asked.learned.values()), grad_out.double())
    return dict(zip(asked.learned, grads, strict=True))


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None, asked: Asked
) -> tuple[Tensor, Tensor]:
    """Output and LSE in the dtype of the inputs."""
    repeats = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(repeats, 1) for x in (k, v)]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    asked = asked.learning(lambda x: x.to(q.dtype))
    hidden = ~visible(mask, q.shape[0], q.shape[2], k.shape[2])
    scores, hidden = asked.biased(q @ wide[0].mT * factor, hidden)
    scores = scores.masked_fill(hidden, float("-inf"))
    if asked.sinks is not None:
        sinks = asked.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores, wide[1] = torch.cat((scores, sinks), -1), F.pad(wide[1], (0, 0, 0, 1))
    highest = scores.detach().amax(-1, keepdim=True) if scores.shape[3] else scores.new_zeros(1)
    weights = (scores - highest.masked_fill(highest == float("-inf"), 0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights @ wide[1] / total.masked_fill(total == 0, 1)
    return out, scores.logsumexp(-1)


def single_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    asked: Asked = PLAIN,
) -> Answer:
    """What torch's own kernel of the same dtype gives for the whole sequence: the yardstick.

    Where scores have terms, or keys and values are of two sizes, it is plain maths in that dtype.

    Returns:
        The names of `Answer`, in the dtype of the inputs; `lse` in float for half precision.
    """
    q, k, v = inputs = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    if asked is not PLAIN or q.shape[3] != v.shape[3]:
        out, logs = _written_out(q, k, v, mask=mask, scale=scale, asked=asked)
        grads = torch.autograd.grad(out, inputs, grad_out)
        return Answer(out.detach(), logs.detach().to(state_dtype(q.dtype)), *grads)
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
