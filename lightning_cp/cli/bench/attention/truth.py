"""How far results are from the truth, beside what one device computes in the same dtype."""

import torch
from torch import Tensor

from lightning_cp.cli.bench.attention.measure import Attention, DistributedCall, Inputs
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.kernels import resolve
from lightning_cp.layout import contiguous
from lightning_cp.mask import Mask
from lightning_cp.plan import build_plan

MATHS = 2048
"""Up to this length the truth is plain maths; above, the fused kernel in double."""


class Truth:
    """Attention of a whole row in double, and in the dtype of the inputs by one device's kernel.

    Args:
        inputs: whole tensors, `[B, H or Hk, S, D]`.
        mask: who sees whom.
    """

    def __init__(self, inputs: Inputs, mask: Mask) -> None:
        name = "reference" if mask.q_length <= MATHS else "auto"
        self._exact = _alone(Inputs(*(x.double() for x in inputs)), mask, name)
        self._double = inputs.q.dtype == torch.float64
        self._errors = [0.0] * len(self._exact)
        if not self._double:
            single = _alone(inputs, mask, "auto")
            self._errors = list(map(_error, single, self._exact))

    def ratios(self, found: Attention) -> dict[str, float]:
        """For each tensor its largest absolute error over that of the single device.

        For double the error itself. The single device's error counts as at least what rounding
        explains: half a unit in the last place of the largest element of the truth, plus half a
        float unit of one, for terms of that size that cancel.

        Args:
            found: the whole row, in the dtype of the inputs.
        """
        ratios = {}
        rows = zip(Attention._fields, found, self._exact, self._errors, strict=True)
        for name, tensor, exact, single in rows:
            error = _error(tensor, exact)
            if self._double:
                ratios[name] = error
                continue
            largest = float(exact.abs().max())
            units = torch.finfo(tensor.dtype).eps * largest + torch.finfo(torch.float32).eps
            ratios[name] = error / max(single, units / 2)
        return ratios


def _alone(inputs: Inputs, mask: Mask, kernel: str) -> Attention:
    """What one rank computes that holds everything, a key head after the other."""
    layout = contiguous(mask.q_length, 1)
    plan = build_plan(layout, layout, mask, rank=0, exchange="ring")
    ratio = inputs.q.shape[1] // inputs.k.shape[1]
    parts = []
    for head in range(inputs.k.shape[1]):
        q = slice(head * ratio, (head + 1) * ratio)
        kv = slice(head, head + 1)
        some = Inputs(inputs.q[:, q], inputs.k[:, kv], inputs.v[:, kv], inputs.grad_out[:, q])
        chosen = resolve(kernel, some.q, some.v)
        parts.append(DistributedCall(plan, chosen, some, Mailboxes().link(0))())
    return Attention(*(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)))


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max())
