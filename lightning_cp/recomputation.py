"""Recomputation in the backward: keeping attention, so that its exchange is not repeated."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

OPERATORS = (
    *("lightning_cp::attention", "lightning_cp::token_sums", "lightning_cp::element_sums"),
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
)
"""What is kept, as far as its package has been imported."""


def checkpoint_policy() -> Callable[[], Contexts]:
    """Keeps what attention gives where a layer is recomputed, so that its exchange runs once.

    For every rank alike: `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False,
    context_fn=checkpoint_policy())`, and for models of Hugging Face
    `gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_policy()}`.
    Everything else of the layer is recomputed. Kept are, for each attention call, its output
    `[B, H, S_local, Dv]` and its LSE `[B, H, S_local]` in float, and the sums of losses. Without it
    a recomputed layer fetches the keys and values of other ranks again, with the same results.

    Returns:
        A `context_fn` of `torch.utils.checkpoint.checkpoint`, for any number of calls.
    """
    return _contexts


def _contexts() -> Contexts:
    spaces = [name.split("::") for name in OPERATORS]
    found = [getattr(getattr(torch.ops, space), name, None) for space, name in spaces]
    kept = [packet.default for packet in found if packet is not None]
    contexts: Contexts = create_selective_checkpoint_contexts(kept)
    return contexts


def described(module: nn.Module | None) -> str:
    """What recomputed layers of a model do with their attention, for the start table."""
    makers = [] if module is None else list(filter(None, map(_checkpointing, module.modules())))
    if not makers:
        return "of layers with attention: its exchange too, unless checkpoint_policy() is used"
    repeated = sum(maker.keywords.get("context_fn") is not _contexts for maker in makers)
    if not repeated:
        return f"of {len(makers)} modules, with their attention kept"
    return (
        f"of {len(makers)} modules, with the exchange of attention repeated in {repeated}; "
        f"context_fn=lightning_cp.checkpoint_policy() keeps it"
    )


def _checkpointing(module: nn.Module) -> Any:
    """How a module recomputes what is in it: a partial call of torch's function, or None."""
    names = ("_gradient_checkpointing_func", "checkpoint_fn")  # of transformers, of torch
    active = getattr(module, "gradient_checkpointing", True)
    found = next((vars(module).get(name) for name in names if name in vars(module)), None)
    return found if active and isinstance(found, partial) else None
