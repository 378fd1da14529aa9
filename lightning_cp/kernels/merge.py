"""Merging partial attention results: running output and LSE in float, cast once at the end."""

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of running sums for inputs of `dtype`: float, double for double."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into the running one, in place.

    Max form: with m = max(lse, part_lse) the weights are exp(lse - m) and exp(part_lse - m), which
    cannot overflow; m is 0 where both are -inf, and a row that has seen no key stays 0 with LSE
    -inf.

    Args:
        out: running output `[..., S, D]`, float or double.
        lse: running LSE `[..., S]`, -inf where nothing was seen.
        part: output of another set of keys, any float dtype.
        part_lse: its LSE.
    """
    highest = torch.maximum(lse, part_lse)
    highest.masked_fill_(highest == float("-inf"), 0)
    weight, part_weight = (lse - highest).exp_(), (part_lse - highest).exp_()
    total = weight + part_weight
    inverse = total.clamp_min(torch.finfo(total.dtype).tiny).reciprocal_()
    out.mul_(weight.mul_(inverse).unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), part_weight.mul_(inverse).unsqueeze(-1))
    lse.copy_(total.log_().add_(highest))
