"""Numbers that tell batches apart: a hash of shapes and one of contents."""

import zlib
from typing import Any

import torch
from torch import Tensor

from lightning_cp.data.containers import items

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def shapes_of(batch: Any) -> str:
    """Names, shapes and dtypes of the tensors of a batch, readable."""
    return ", ".join(
        f"{name or 'tensor'} {tuple(value.shape)} {value.dtype}"
        for name, value in items(batch).items()
        if isinstance(value, Tensor)
    )


def content_code(batch: Any) -> int:
    """A 32-bit hash of the values of all tensors of a batch."""
    code = 0
    for name, value in items(batch).items():
        if isinstance(value, Tensor):
            code = zlib.crc32(f"{name}/{_sum(value)}".encode(), code)
    return code


def _sum(tensor: Tensor) -> int:
    """A weighted sum of the bits, in wrapping 64-bit integers: one pass, order matters."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype != torch.bool:
        flat = flat.view(_WIDTHS.get(flat.dtype.itemsize, torch.uint8))
    weights = torch.arange(flat.numel(), device=flat.device) * 2654435761 + 97
    return int((flat.to(torch.int64) * (weights ^ (weights >> 7))).sum())
