"""What the CUDA kernels have in common: where they run, and how they want their tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.float16, torch.bfloat16)
ALIGNMENT = 8
"""Elements: head sizes, strides and offsets are multiples of it (16 bytes in half precision)."""


def unfit(q: Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why tensors like `q` are not for a CUDA kernel of these dtypes, or None."""
    if q.device.type != "cuda":
        return f"runs on CUDA devices, not on {q.device.type} tensors"
    if torch.version.hip is not None:
        return "has not been tried on ROCm builds of torch"
    if q.dtype not in dtypes:
        return f"takes {' and '.join(str(dtype) for dtype in dtypes)}, got {q.dtype}"
    return None


def too_old(device: torch.device, needed: tuple[int, int]) -> str | None:
    """Why a device is too old for a kernel, or None."""
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        need, have = (f"{major}.{minor}" for major, minor in (needed, found))
        return f"needs compute capability {need}, this device has {have}"
    return None


def width(*sizes: int) -> int:
    """The head size that a kernel can take, for heads of at most these sizes."""
    return -(-max(sizes) // ALIGNMENT) * ALIGNMENT


def aligned(x: Tensor, size: int) -> Tensor:
    """`x` with a last dimension of `size`, zeros behind, and with strides that a kernel can take.

    A copy only where that takes one.
    """
    if x.shape[-1] < size:
        x = F.pad(x, (0, size - x.shape[-1]))
    odd = any(step % ALIGNMENT for step in (*x.stride()[:-1], x.storage_offset()))
    return x.clone(memory_format=torch.contiguous_format) if odd or x.stride(-1) != 1 else x
