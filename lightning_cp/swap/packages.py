"""Attention functions of other modules and packages, which a context refuses by name.

They compute over the tokens of a rank and never come to the overrides. What each does is replaced,
not its name, so that a call is seen however the function was imported.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap import flash_attn
from lightning_cp.swap._torch import replace_code
from lightning_cp.swap.guard import outside_only
from lightning_cp.swap.where import caller

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch.nn.attention.flex_attention": ("flex_attention",),
    "torch.nn.attention.varlen": ("varlen_attn", "varlen_attn_out"),
    "flash_attn.flash_attn_interface": ("flash_attn_with_kvcache",),
    "flash_attn_interface": (  # version 3
        *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
        "flash_attn_with_kvcache",
    ),
    "flash_attn.cute.interface": ("flash_attn_func", "flash_attn_varlen_func"),  # version 4
    "xformers.ops.fmha": (
        *("memory_efficient_attention", "memory_efficient_attention_partial"),
        *("memory_efficient_attention_forward", "memory_efficient_attention_backward"),
        "memory_efficient_attention_forward_requires_grad",
    ),
}
"""By module; modules that cannot be imported are not there to be called."""

WITHOUT_OPERATORS = (
    *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"),
    *("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func"),
    "flash_attn_varlen_qkvpacked_func",
)
"""Functions of flash_attn before 2.7, which registers no operators; see `swap.flash_attn`."""

WAY_OUT = (
    "computes over this rank's tokens alone and is not supported under context parallelism; call "
    "torch.nn.functional.scaled_dot_product_attention (is_causal=True for causal attention), or "
    "lightning_cp.attend, which takes windows, while documents and padding come from the batch; "
    "or wrap the call in functional.local() where it is meant for this rank's tokens alone"
)


def install() -> list[Callable[[], None]]:
    """Let every function of `FUNCTIONS` that is there refuse to run within a context.

    Returns:
        What puts each function back.
    """
    return [replace_code(function, _refused) for function in _found()]


def _found() -> Iterator[FunctionType]:
    for name, functions in FUNCTIONS.items():
        try:
            module = import_module(name)
        except (ImportError, OSError):
            continue
        if name == "flash_attn.flash_attn_interface" and not flash_attn.is_registered():
            functions += WITHOUT_OPERATORS
        for function in functions:
            found = getattr(module, function, None)
            if isinstance(found, FunctionType):
                yield found


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    first = next(iter(inspect.signature(original).parameters))
    reason = f"{original.__module__}.{original.__name__} {WAY_OUT}"

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        # While a compiler traces, the graph is made for both situations; see `outside_only`.
        if torch.compiler.is_compiling():
            if SLOT.suspended:
                return original(*args, **kwargs)
            if args:
                return original(outside_only(args[0], reason), *args[1:], **kwargs)
            return original(**{**kwargs, first: outside_only(kwargs[first], reason)})
        if SLOT.current is not None:
            raise RefusedError(f"{caller(SLOT.current)}: {reason}")
        SLOT.count_plain_attention()
        return original(*args, **kwargs)

    return replacement
