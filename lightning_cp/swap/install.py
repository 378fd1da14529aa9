"""Installing the overrides, and removing them without a trace.

Composite operators are overridden at the dispatcher, where every call passes. Functions that are no
composite operators are replaced in `torch.nn.functional`, where torch's own modules look them up.

[Note: compiled code and overrides] Under torch.compile an override runs at trace time only, so
code compiled before installing, or cached by another job, would bake the wrong attention in.
Installing and removing therefore reset the compiler, drop resolved dispatches, and mark the
compile cache's keys.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo

from lightning_cp.errors import ConfigError
from lightning_cp.swap import flash_attn, functions, losses, multihead, packages, random, sdpa
from lightning_cp.swap._torch import (
    JAGGED,
    OPERATORS,
    VMAP,
    forget_compiled,
    has_override,
    keys,
    nested_keys,
    original,
    override,
    replace_function,
    replace_method,
)

KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "scaled_dot_product_attention": sdpa.scaled_dot_product_attention,
    "cross_entropy_loss": losses.cross_entropy_loss,
    "nll_loss_nd": losses.nll_loss_nd,
    **random.KERNELS,
}
FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "multi_head_attention_forward": multihead.multi_head_attention_forward,
    **functions.LOSSES,
}
"""Functions of `torch.nn.functional`, each with what makes its replacement from the original."""

CACHE_TAG = "lightning_cp"


class Installation:
    """Overrides of attention and losses for the lifetime of this object, or until `remove`.

    Args:
        device_types: device types whose calls are seen.

    Raises:
        ConfigError: if a device type is not supported, or if another override is in place.
    """

    def __init__(self, device_types: Iterable[str] = ("cpu",)) -> None:
        self._removers: list[Callable[[], None]] = []
        unknown = sorted(set(device_types) - {"cpu", "cuda"})
        if unknown:
            raise ConfigError(f"device types {unknown} are not supported; use cpu or cuda")
        places = [(n, key) for n in OPERATORS for kind in device_types for key in keys(kind)]
        taken = [f"aten::{name} at {key}" for name, key in places if has_override(name, key)]
        if taken:
            raise ConfigError(
                f"{', '.join(taken)} is overridden already, by a context-parallel strategy that "
                f"was not torn down or by another package; remove it first, two cannot share a call"
            )
        for name, key in places:
            self._removers.append(override(name, key, KERNELS[name]))
        for name, make in FUNCTIONS.items():
            self._removers.append(replace_function(name, make))
        for name in random.FUNCTIONS:
            self._removers.append(replace_function(name, random.drawing, torch))
        for name in random.METHODS:
            self._removers.append(replace_method(name, random.drawing))
        self._refuse_unseen(device_types)
        self._removers += packages.install()
        self._removers += flash_attn.install(device_types)
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        self._tag = torch.compiler.config.cache_key_tag
        torch.backends.mha.set_fastpath_enabled(False)
        torch.compiler.config.cache_key_tag = f"{self._tag}{CACHE_TAG}"
        _forget()

    def _refuse_unseen(self, device_types: Iterable[str]) -> None:
        """Attention that never gets to the overrides: within vmap, and over nested tensors."""
        name = "scaled_dot_product_attention"
        vmapped, nested = sdpa.only_outside(sdpa.VMAPPED), sdpa.only_outside(sdpa.NESTED)
        self._removers.append(override(name, VMAP, vmapped(original(name))))
        for key in dict.fromkeys(key for kind in device_types for key in nested_keys(kind)):
            self._removers.append(override(name, key, nested(original(name))))
        module, function = JAGGED
        self._removers.append(replace_function(function, nested, module))

    def remove(self) -> None:
        """Put everything back; calling it again does nothing."""
        if not self._removers:
            return
        while self._removers:
            self._removers.pop()()
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        torch.compiler.config.cache_key_tag = self._tag
        _forget()


def _forget() -> None:
    torch._dynamo.reset()
    for name in OPERATORS:
        forget_compiled(name)
