"""Results that grow tile by tile: written where nothing was yet, merged or added elsewhere.

A result is in its own dtype as long as every row has got one part that is no wider, which is
exact, and from then on in that of a running result.

Legend: B batch, H heads, S local rows, D head size.
"""

import torch
from torch import Tensor

from lightning_cp.kernels.base import Part, cut
from lightning_cp.kernels.merge import chunks, merge_
from lightning_cp.spans import Span, Spans, gaps, union


class _Rows:
    """Which of the rows of a result hold something."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._written: Spans = ()

    def missing(self, span: Span | None = None) -> Spans:
        """Rows of `span`, or of all, that hold nothing yet."""
        return gaps(span or (0, self._size), self._written)

    def mark(self, span: Span) -> None:
        self._written = union((*self._written, span))

    def widened(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of `x` that hold something, in a tensor of `dtype` that is stored as `x`."""
        if x.dtype == dtype:
            return x
        wide = torch.empty_like(x, dtype=dtype)
        for span in self._written:
            cut(wide, None, span).copy_(cut(x, None, span))
        return wide


class RunningAttention:
    """Output and LSE over the keys seen so far.

    Args:
        out: `[B, H, S, D]`, the result; may hold anything.
        lse: `[B, H, S]`.
        dtype: of the running result.
        several: rows will get several parts.
    """

    def __init__(self, out: Tensor, lse: Tensor, dtype: torch.dtype, *, several: bool) -> None:
        self.out, self.lse = out, lse
        self._rows, self._dtype = _Rows(out.shape[2]), dtype
        if several:
            self._widen()

    def add(self, part: Part) -> None:
        """Take in the attention of some rows over further keys."""
        row, span = part.tile.row, part.tile.q
        if span[0] == span[1]:
            return
        missing = self._rows.missing(span)
        if row is None and missing == (span,):
            if part.out.dtype.itemsize > self.out.dtype.itemsize:
                self._widen()
            cut(self.out, row, span).copy_(part.out)
            cut(self.lse, row, span).copy_(part.lse)
        else:
            self._widen()
            self._clear(missing)
            merge_(cut(self.out, row, span), cut(self.lse, row, span), part.out, part.lse)
        self._rows.mark(span)

    def finish(self) -> None:
        """Rows that saw no key have output 0 and LSE -inf."""
        self._clear(self._rows.missing())
        self._rows.mark((0, self.out.shape[2]))

    def sink(self, sinks: Tensor | None) -> None:
        """Let every row also see a key with a score of its head, `[H]`, and a value of 0."""
        if sinks is None:
            return
        score = sinks.to(self.lse.dtype)[:, None]
        blind = self.lse == float("-inf")
        weight = (self.lse - score).sigmoid_().masked_fill_(blind, 0).unsqueeze(-1)
        for rows in chunks(self.out):
            self.out[:, :, rows].mul_(weight[:, :, rows])  # in the wider dtype, rounded once
        torch.logaddexp(self.lse, score.expand_as(self.lse), out=self.lse)

    def _clear(self, spans: Spans) -> None:
        for span in spans:
            cut(self.out, None, span).zero_()
            cut(self.lse, None, span).fill_(float("-inf"))

    def _widen(self) -> None:
        self.out = self._rows.widened(self.out, self._dtype)
        self.lse = self._rows.widened(self.lse, self._dtype)


class RunningSum:
    """A gradient that is summed up.

    Args:
        total: `[B, H, S, D]`, the result; may hold anything.
        dtype: of the sum, that of `total` where None.
        several: rows will get several parts.
    """

    def __init__(
        self, total: Tensor, dtype: torch.dtype | None = None, *, several: bool = False
    ) -> None:
        self.total = total
        self._rows, self._dtype = _Rows(total.shape[2]), dtype or total.dtype
        if several:
            self._widen()

    def add(self, row: int | None, span: Span, part: Tensor) -> None:
        """Add to the rows `span` of one batch row, or of all."""
        if span[0] == span[1]:
            return
        missing = self._rows.missing(span)
        if row is None and missing == (span,):
            if part.dtype.itemsize > self.total.dtype.itemsize:
                self._widen()
            cut(self.total, row, span).copy_(part)
        else:
            self._widen()
            self._clear(missing)
            cut(self.total, row, span).add_(part)
        self._rows.mark(span)

    def finish(self) -> None:
        """Rows to which nothing was added are 0."""
        self._clear(self._rows.missing())
        self._rows.mark((0, self.total.shape[2]))

    def _clear(self, spans: Spans) -> None:
        for span in spans:
            cut(self.total, None, span).zero_()

    def _widen(self) -> None:
        self.total = self._rows.widened(self.total, self._dtype)
