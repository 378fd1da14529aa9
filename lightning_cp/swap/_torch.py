"""Every private name of torch that swapping needs, in one place; a test pins them."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nested._internal import ops as jagged
from torch.nn import _reduction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

JAGGED = jagged, "jagged_scaled_dot_product_attention"
"""What computes attention over jagged tensors, before any dispatch."""

VMAP = "FuncTorchVmapMode"
"""Dispatch key at which every call within `vmap` passes; torch has kernels of its own there."""

OPERATORS = (
    *("scaled_dot_product_attention", "cross_entropy_loss", "nll_loss_nd"),
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_"),
)
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


def nested_keys(device_type: str) -> tuple[str, str]:
    """Dispatch keys of calls on nested tensors, with and without autograd."""
    return "AutogradNestedTensor", f"NestedTensor{keys(device_type)[1]}"


def has_override(name: str, key: str) -> bool:
    """Whether somebody registered a kernel of a composite operator at a dispatch key."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
    return found


def override(name: str, key: str, kernel: Callable[..., Tensor]) -> Callable[[], None]:
    """Register a kernel at a dispatch key; returns what removes it again."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # where torch has a kernel, which comes back with removal
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl(name, kernel, key)
    return library._destroy


def replace_function(
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    module: ModuleType = torch.nn.functional,
) -> Callable[[], None]:
    """Replace a function, of `torch.nn.functional` if not told otherwise.

    Returns:
        What puts the original back.
    """
    before = getattr(module, name)
    setattr(module, name, make(before))
    return lambda: setattr(module, name, before)


def replace_method(name: str, make: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of every tensor.

    Returns:
        What puts the original back.
    """
    inherited = name not in vars(torch.Tensor)
    before = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, make(before))

    def undo() -> None:
        if inherited:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, before)

    return undo


def forget_compiled(name: str) -> None:
    """Drop a resolved dispatch that survives `torch._dynamo.reset()`."""
    overload(name)._dispatch_cache.clear()


def is_tracing(*tensors: Tensor) -> bool:
    """Whether the tensors belong to a compiler's trace: what is emitted now runs later."""
    return detect_fake_mode(list(tensors)) is not None


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that deprecated arguments of a loss mean, with torch's warning."""
    return _reduction.legacy_get_string(size_average, reduce)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor stands for others (DTensor, jagged) without data of its own."""
    return is_traceable_wrapper_subclass(tensor)
