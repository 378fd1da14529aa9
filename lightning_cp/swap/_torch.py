"""Every private name of torch that swapping needs, in one place; a test pins them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

OPERATORS = ("scaled_dot_product_attention", "cross_entropy_loss", "nll_loss_nd")
"""Composite operators of aten that are overridden."""


def overload(name: str) -> Any:
    """The default overload of an aten operator."""
    return getattr(torch.ops.aten, name).default


def original(name: str) -> Callable[..., Tensor]:
    """The composite implementation, which an override leaves in place."""
    composite: Callable[..., Tensor] = overload(name).decompose
    return composite


def keys(device_type: str) -> tuple[str, str]:
    """Dispatch keys at which every eager call on a device passes, with and without autograd."""
    backend = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    return f"Autograd{backend}", backend


def has_override(name: str, key: str) -> bool:
    """Whether somebody registered a kernel of a composite operator at a dispatch key."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    return found


def override(name: str, key: str, kernel: Callable[..., Tensor]) -> Callable[[], None]:
    """Register a kernel at a dispatch key; returns what removes it again."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, kernel, key)
    return library._destroy


def replace_function(
    name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a function of `torch.nn.functional`; returns what puts the original back."""
    before = getattr(torch.nn.functional, name)
    setattr(torch.nn.functional, name, make(before))
    return lambda: setattr(torch.nn.functional, name, before)


def forget_compiled(name: str) -> None:
    """Drop a resolved dispatch that survives `torch._dynamo.reset()`."""
    overload(name)._dispatch_cache.clear()


def is_tracing(*tensors: Tensor) -> bool:
    """Whether the tensors belong to a compiler's trace: what is emitted now runs later."""
    return detect_fake_mode(list(tensors)) is not None
