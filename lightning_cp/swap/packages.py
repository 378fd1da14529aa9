"""Attention functions of other modules and packages, which never come to the overrides.

They compute over the tokens of a rank. What each does is replaced, not its name, so that a call is
seen however the function was imported: by the same over the whole sequence, or by a refusal.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any

from lightning_cp.swap import flash_attn, flash_attn_later, flex
from lightning_cp.swap._torch import replace_code
from lightning_cp.swap.guard import refused

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch.nn.attention.varlen": ("varlen_attn", "varlen_attn_out"),
    "flash_attn.flash_attn_interface": ("flash_attn_with_kvcache",),
    "flash_attn_interface": ("flash_attn_with_kvcache",),  # version 3
    "xformers.ops.fmha": (
        *("memory_efficient_attention", "memory_efficient_attention_partial"),
        *("memory_efficient_attention_forward", "memory_efficient_attention_backward"),
        "memory_efficient_attention_forward_requires_grad",
    ),
}
"""By module; modules that cannot be imported are not there to be called."""

SWAPS: dict[str, Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "torch.nn.attention.flex_attention": flex.SWAPS,
    "flash_attn_interface": flash_attn_later.THIRD,
    "flash_attn.cute.interface": flash_attn_later.FOURTH,
}
"""Functions that a context computes over the whole sequence, with what makes the replacement."""

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
    """Replace every function of `SWAPS`, and let those of `FUNCTIONS` refuse to run in a context.

    Returns:
        What puts each function back.
    """
    swaps = {name: tuple(functions) for name, functions in SWAPS.items()}
    return [
        *(replace_code(f, SWAPS[name][f.__name__]) for name, f in _found(swaps)),
        *(replace_code(f, _refused) for _, f in _found(FUNCTIONS)),
    ]


def _found(wanted: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, FunctionType]]:
    """Functions by name of their module, where they are there."""
    for name, functions in wanted.items():
        try:
            module = import_module(name)
        except (ImportError, OSError):
            continue
        if name == "flash_attn.flash_attn_interface" and not flash_attn.is_registered():
            functions += WITHOUT_OPERATORS
        for function in functions:
            found = getattr(module, function, None)
            if isinstance(found, FunctionType):
                yield name, found


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    return refused(original, f"{original.__module__}.{original.__name__} {WAY_OUT}")
