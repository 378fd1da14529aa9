"""Comparing what one device computed with what a rank computed on its part of the sequence."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.context import Context
from lightning_cp.sequences import Sequence

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, over the largest value, that rounding explains."""


class Difference(NamedTuple):
    """How far a tensor is from where it should be.

    Attributes:
        error: largest difference over the largest value; infinite where shapes do not fit.
        shapes: both shapes, of one device and of this rank.
    """

    error: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def tolerated(self, dtype: torch.dtype) -> bool:
        """Whether rounding explains it."""
        return self.error <= TOLERANCES.get(dtype, 0.0)


def furthest(whole: Mapping[str, Tensor], part: Mapping[str, Tensor], context: Context) -> float:
    """Largest error of the tensors that both have, over what rounding explains; 1 is the limit.

    A tensor that only one side has does not count: a mask over the whole sequence, for example, is
    not built on a shard.

    Args:
        whole: tensors of one device, by name.
        part: tensors of this rank.
        context: what the rank ran under.
    """
    worst = 0.0
    for name, tensor in whole.items():
        if name in part:
            found = difference(tensor, part[name], context)
            worst = max(worst, found.error / TOLERANCES.get(_coarser(tensor, part[name]), 1e-12))
    return worst


def difference(whole: Tensor, part: Tensor, context: Context) -> Difference:
    """Compare a whole tensor at this rank's positions with the rank's own tensor.

    Dimensions whose sizes differ must be the sequence, rows and sequence as one dimension, or rows
    that are alike (positions `[S]` or `[1, S]` beside `[B, S]`). Dummy tokens and padding are left
    out, because one device has no meaning for them either.
    """
    shapes = (tuple(whole.shape), tuple(part.shape))
    if whole.layout != torch.strided or part.layout != torch.strided:
        return Difference(float("inf"), shapes)
    ndim = max(whole.ndim, part.ndim)
    expected, found = (x.reshape((1,) * (ndim - x.ndim) + x.shape) for x in (whole, part))
    for dim in range(ndim):
        sizes = expected.shape[dim], found.shape[dim]
        if sizes[0] == sizes[1]:
            continue
        if 1 in sizes and max(sizes) in {s.batch for s in context.sequences.values()}:
            expected, found = (
                x.expand(*x.shape[:dim], max(sizes), *x.shape[dim + 1 :]) for x in (expected, found)
            )
        else:
            pair = _cut(expected, found, dim, context)
            if pair is None:
                return Difference(float("inf"), shapes)
            expected, found = pair
    return Difference(_error(expected, found), shapes)


def relative(found: Tensor, expected: Tensor, scale: float) -> float:
    """Largest difference over the largest expected value, which counts as at least `scale`."""
    return _error(expected, found, scale)


def _cut(whole: Tensor, part: Tensor, dim: int, context: Context) -> tuple[Tensor, Tensor] | None:
    """Both tensors at this rank's real, visible tokens; None where the sizes are no sequence's."""
    for sequence in context.sequences.values():
        share = sequence.layout.size(context.rank)
        for rows in (1, sequence.batch):
            sizes = (rows * sequence.length, rows * share)
            if (whole.shape[dim], part.shape[dim]) == sizes:
                with torch.no_grad():
                    places = _places(sequence, context.rank, rows)
                    return _visible(
                        whole.index_select(dim, places.whole.to(whole.device)),
                        part.index_select(dim, places.part.to(part.device)),
                        dim,
                        rows,
                        sequence.visible_keys(context.rank)[:, sequence.real(context.rank)],
                    )
    return None


class _Places(NamedTuple):
    whole: Tensor
    part: Tensor


def _places(sequence: Sequence, rank: int, rows: int) -> _Places:
    """Where this rank's real tokens lie in the whole dimension and in its own."""
    real = sequence.real(rank)
    positions = sequence.layout.positions(rank)[real]
    local = real.nonzero().flatten()
    starts = torch.arange(rows)[:, None]
    return _Places(
        (starts * sequence.length + positions).flatten(), (starts * len(real) + local).flatten()
    )


def _visible(
    whole: Tensor, part: Tensor, dim: int, rows: int, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Set what lies at padding to 0 in both, where the rows of the batch can be told."""
    batch = visible.shape[0]
    shape = [1] * whole.ndim
    if rows == batch and rows > 1:
        mask, shape[dim] = visible.flatten(), visible.numel()
    elif dim > 0 and whole.shape[0] == batch:
        mask, shape[0], shape[dim] = visible, batch, visible.shape[1]
    elif dim == 0 and whole.ndim > 1 and whole.shape[1] == batch:
        mask, shape[0], shape[1] = visible.T, visible.shape[1], batch
    else:
        return whole, part
    hidden = ~mask.reshape(shape).to(whole.device)
    return whole.masked_fill(hidden, 0), part.masked_fill(hidden, 0)


def coarsest(tensors: Iterable[Tensor]) -> float:
    """The largest difference that rounding explains in any of these tensors."""
    return max((TOLERANCES.get(tensor.dtype, 0.0) for tensor in tensors), default=0.0)


def _coarser(a: Tensor, b: Tensor) -> torch.dtype:
    """The floating dtype with less precision, or the dtype of the first where none floats."""
    dtypes = [x.dtype for x in (a, b) if x.dtype in TOLERANCES]
    return max(dtypes, key=lambda dtype: TOLERANCES[dtype]) if dtypes else a.dtype


def _error(expected: Tensor, found: Tensor, least: float = 0.0) -> float:
    if expected.shape != found.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    a, b = expected.double(), found.double()
    apart = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(apart.any()):
        return 0.0
    far = (a - b).abs()[apart].max()
    scale = max(float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0, least)
    return float("inf") if not bool(far.isfinite()) else float(far) / (scale or 1.0)
