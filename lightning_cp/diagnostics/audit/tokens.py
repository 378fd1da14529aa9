"""Which dimension of a tensor is unmistakably the sequence.

[Note: unmistakable] A model has many dimensions, and some have the size of a rank's share by
chance. A dimension counts as the sequence only if its size is a share of at least `SMALLEST`, no
other dimension of the tensor has that size, and it stands where sequences stand beside the rows of
the batch. Where a parameter has a dimension of that size too, only `[B, S, ...]` counts. What is
missed by this is left to the comparison of losses and to `verify`.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lightning_cp.context import Context

SMALLEST = 3
"""Shares below this are too small to tell a sequence from any other dimension."""


class Tokens:
    """What this rank's tokens look like in a tensor.

    Args:
        context: the context of the step.

    Attributes:
        rows: for every share, the rows of the batches that have it.
    """

    def __init__(self, context: Context) -> None:
        self.rows: dict[int, set[int]] = {}
        for sequence in context.sequences.values():
            share = sequence.layout.size(context.rank)
            if share >= SMALLEST:
                self.rows.setdefault(share, set()).add(sequence.batch)
        self._module = context.module

    def is_share(self, size: object) -> bool:
        """Whether a size is a share; symbolic sizes of a trace are none."""
        return type(size) is int and size in self.rows

    def is_width(self, size: int) -> bool:
        """Whether a parameter of the model has a dimension of this size."""
        return size in self._widths

    def at(self, tensor: Tensor, dim: int) -> int:
        """The share that `dim` of a tensor is, 0 if it may be anything else; see the note."""
        shape = tensor.shape
        if not shape:
            return 0
        dim %= len(shape)
        size = shape[dim]
        if not self.is_share(size) or any(type(other) is not int for other in shape):
            return 0
        if shape.count(size) > 1 or not self._placed(tensor, dim):
            return 0
        return size

    def _placed(self, tensor: Tensor, dim: int) -> bool:
        shape, dims = tensor.shape, tensor.ndim
        rows = self.rows[shape[dim]]
        if self.is_width(shape[dim]):
            is_labels = not tensor.is_floating_point()
            return dim == 1 and shape[0] in rows and (dims > 2 or is_labels)
        if dim == 0:
            return dims > 2 and shape[1] in rows
        channels_first = dim == dims - 1 and (dims == 3 or shape[-2] == 1)
        return shape[0] in rows and (dim in (1, dims - 2) or channels_first)

    def is_table(self, tensor: Tensor, share: int) -> bool:
        """Whether a tensor is kept by a module, and `share` entries of it can only be tokens."""
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter) and self.is_width(share):
            return False  # parts of a fused weight
        return any(base is kept for kept in self._kept())

    def _kept(self) -> Iterator[Tensor]:
        """Parameters, buffers and other tensors that the modules hold."""
        root = self._module() if self._module is not None else None
        for module in root.modules() if root is not None else ():
            held: Mapping[str, object] = vars(module)
            for values in (module._parameters, module._buffers, held):
                yield from (value for value in values.values() if isinstance(value, Tensor))

    @cached_property
    def _widths(self) -> frozenset[int]:
        root = self._module() if self._module is not None else None
        parameters = root.parameters() if root is not None else ()
        return frozenset(size for parameter in parameters for size in parameter.shape)
