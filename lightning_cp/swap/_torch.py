"""Every private name of torch that swapping needs, in one place; a test pins them."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
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


def override(
    name: str, key: str, kernel: Callable[..., Any], *, namespace: str = "aten"
) -> Callable[[], None]:
    """Register a kernel at a dispatch key; returns what removes it again.

    It is never compiled itself, where a compiler has given up the code that calls it.
    """
    library, kernel = torch.library.Library(namespace, "IMPL"), torch.compiler.disable(kernel)
    with warnings.catch_warnings():  # where there is a kernel, which comes back with removal
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl(name, kernel, key, allow_override=True)
    return library._destroy


def wrap_kernel(
    name: str, key: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], namespace: str
) -> Callable[[], None] | None:
    """Replace an operator's kernel at a dispatch key by one that may call it.

    Returns:
        What puts the kernel back; None where there is no such operator or kernel.
    """
    operator = getattr(getattr(torch.ops, namespace), name, None)
    full = f"{namespace}::{name}"
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
        return None
    before = torch.library.get_kernel(full, key)
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    schema = operator.default._schema.arguments
    names = tuple(argument.name for argument in schema)
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}

    def plain(call: Mapping[str, Any]) -> Any:
        return before.call_boxed(keyset, *(call[name] for name in names))

    replacement = make(plain)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return replacement(defaults | dict(zip(names, args, strict=False)) | kwargs)

    return override(name, key, kernel, namespace=namespace)


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


def replace_code(
    function: FunctionType, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace what a plain function does, for those too who imported it by name.

    Returns:
        What puts the original back.
    """
    code, space = function.__code__, function.__globals__
    defaults, keywords = function.__defaults__, function.__kwdefaults__
    before = FunctionType(code, space, function.__name__, defaults, function.__closure__)
    before.__kwdefaults__ = keywords
    name = f"_replacement_of_{function.__name__}"
    found: dict[str, FunctionType] = {}
    exec(f"def call(*args, **kwargs): return {name}(*args, **kwargs)", found)
    signature = inspect.signature(function)
    space[name] = make(before)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = found["call"].__code__
    function.__signature__ = signature  # type: ignore[attr-defined]

    def undo() -> None:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, keywords
        del function.__signature__, space[name]  # type: ignore[attr-defined]

    return undo


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
