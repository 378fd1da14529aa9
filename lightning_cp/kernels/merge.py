"""Merging partial attention results: running output and LSE in float, cast once at the end."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_cp.plan.memory import CHUNK, state_size


def state_dtype(dtype: torch.dtype, rounds: int = 1) -> torch.dtype:
    """Dtype of running results for inputs of `dtype`: float, double for double.

    Double for float as well where results grow in so many rounds that rounding each of them would
    show; of half precision it does not.
    """
    return torch.float64 if state_size(dtype.itemsize, rounds) == 8 else torch.float32


def chunks(x: Tensor) -> Iterator[slice]:
    """The rows of `[..., S, D]` in parts of about `CHUNK` elements."""
    size = x.shape[-2]
    rows = max(1, CHUNK * size // max(1, x.numel()))
    for start in range(0, size, rows):
        yield slice(start, start + rows)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into the running one, in place.

    The output becomes the mean of both, weighted by exp(lse) and exp(part_lse). The weight of the
    part is the logistic function of the difference of the two, and the new LSE is taken from the
    larger one, so nothing overflows. A row that has seen no key stays 0 with LSE -inf.

    Args:
        out: running output `[..., S, D]`, float or double.
        lse: running LSE `[..., S]`, -inf where nothing was seen.
        part: output of another set of keys, any float dtype.
        part_lse: its LSE.
    """
    for span in chunks(out):
        _merge(out[..., span, :], lse[..., span], part[..., span, :], part_lse[..., span])


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    weight = (part_lse - lse).sigmoid_().masked_fill_(part_lse == float("-inf"), 0)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
