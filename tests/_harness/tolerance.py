"""The one rule for how far a result may be from the truth."""

import torch
from torch import Tensor

FACTOR = 2.0
"""Allowed error, as a multiple of the single-device kernel's."""

FLOOR = 4.0
"""Allowed error in any case: units of the last place of the largest element, and float units of
one, because terms of that size may cancel to nothing (the gradient of a softmax over one key)."""

DOUBLE = 1e-12
"""Allowed error of double results, absolute and relative."""


def assert_as_accurate(
    got: Tensor,
    oracle64: Tensor,
    baseline: Tensor | None,
    *,
    where: str,
    part: Tensor | None = None,
    dim: int = 2,
) -> None:
    """`got` must be about as close to the truth as what one device computes in the same dtype.

    The error is the largest absolute difference over the largest element of the truth. It may be
    `FACTOR` times the baseline's error plus `FLOOR` units of the last place; double results must
    be within `DOUBLE`. Inputs are taken to be of the size of one.

    Args:
        got: what is judged; its dtype decides the rule.
        oracle64: the truth over the whole sequence, in double.
        baseline: result of the single-device kernel in the dtype of `got`, over the whole
            sequence; None, and without meaning, for double.
        where: rank and tensor, for the message.
        part: positions along `dim` that `got` holds, where it is a shard.
        dim: the sequence dimension.

    Raises:
        AssertionError: if shapes differ, elements are not finite where the truth is, or the error
            is above the limit.
    """
    expected = oracle64 if part is None else oracle64.index_select(dim, part)
    assert got.shape == expected.shape, f"{where}: shape {got.shape}, expected {expected.shape}"
    finite = expected.isfinite()
    odd = ~torch.where(finite, got.isfinite(), got.double() == expected)
    assert not odd.any(), (
        f"{where}: {int(odd.sum())} of {odd.numel()} elements are not finite or should not be, "
        f"the first at {odd.nonzero()[0].tolist()}"
    )
    largest = _largest(oracle64)
    error = _distance(got, expected)
    limit = DOUBLE * max(1.0, largest)
    if got.dtype != torch.float64:
        assert baseline is not None, f"{where}: {got.dtype} needs a baseline"
        assert baseline.dtype == got.dtype, f"{where}: {got.dtype} judged by {baseline.dtype}"
        rounding = torch.finfo(got.dtype).eps * largest + torch.finfo(torch.float32).eps
        limit = FACTOR * _distance(baseline, oracle64) + FLOOR * rounding
    assert error <= limit, (
        f"{where}: error {error:.3g} is above {limit:.3g} ({got.dtype}, largest element "
        f"{largest:.3g})"
    )


def _largest(x: Tensor) -> float:
    kept = x[x.isfinite()]
    return float(kept.abs().max()) if kept.numel() else 0.0


def _distance(x: Tensor, y: Tensor) -> float:
    return _largest(torch.where(y.isfinite(), x.double() - y, 0))
