"""Which modules are models of transformers, and what their code says about them."""

import inspect
import re
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

COUNTED = re.compile(r"cumsum\(\s*(attention_)?mask\b|attention_mask(\.\w+\(\))*\.cumsum")
"""Code that counts positions from a mask, as RoBERTa and OPT do."""


def loaded(name: str) -> ModuleType | None:
    """A module of transformers if this process has imported it."""
    return sys.modules.get(f"transformers.{name}")


def pretrained(module: nn.Module | None) -> list[nn.Module]:
    """The `PreTrainedModel`s within a module, itself and nested ones included."""
    utils = loaded("modeling_utils")
    if utils is None or module is None:
        return []
    return [part for part in module.modules() if isinstance(part, utils.PreTrainedModel)]


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module's forward, without `self`."""
    kind: Any = type(module)
    return _parameters(kind)


def makes_positions(module: nn.Module) -> bool:
    """Whether a model makes positions of its own where none are given: no plain 0, 1, 2, ...

    Filling in positions would then change the model.
    """
    place: Any = sys.modules.get(type(module).__module__)
    return bool(COUNTED.search(_source(place)))


class Traits(NamedTuple):
    """What a module says about its batches.

    Attributes:
        takes_positions: it takes `position_ids` that are 0, 1, 2, ... where nobody gives others.
        as_transformers: it holds a model of transformers.
        decodes: it holds an encoder-decoder of transformers, whose labels are the decoder's.
    """

    takes_positions: bool = False
    as_transformers: bool = False
    decodes: bool = False


def traits(module: nn.Module | None) -> Traits:
    """What a module, and the models of transformers within it, say about their batches."""
    if module is None:
        return Traits()
    models = pretrained(module)
    inside = {id(part) for model in models for part in model.modules()}
    own = [part for part in module.modules() if id(part) not in inside]
    takes = any("position_ids" in parameters(part) for part in (*own, *models))
    return Traits(
        takes and not any(makes_positions(model) for model in models),
        bool(models),
        any(is_decoded(model) for model in models),
    )


def is_decoded(model: nn.Module) -> bool:
    """Whether a model of transformers is an encoder with a decoder, and not a part of one."""
    config = getattr(model, "config", None)
    together = getattr(config, "is_encoder_decoder", False)
    return bool(together) and "decoder_input_ids" in parameters(model)


def shifted_right(model: nn.Module, labels: Tensor) -> Tensor:
    """What an encoder-decoder gives its decoder for labels `[B, S]` of whole rows."""
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        method = getattr(model, name, None)
        if method is not None:
            made: Tensor = method(labels)
            return made
    place: Any = sys.modules.get(type(model).__module__)
    shift, config = place.shift_tokens_right, getattr(model, "config", None)
    names = list(inspect.signature(shift).parameters)[1:]
    found: Tensor = shift(labels, *(getattr(config, name) for name in names))
    return found


def looks_up_positions(module: Any) -> bool:
    """Whether a module is a table of positions that takes `position_ids`.

    Its caller may count them from the local length: the table is told the right ones.
    """
    kind = type(module)
    named = kind.__name__.endswith("PositionalEmbedding") and _of_transformers(kind.__module__)
    return named and "position_ids" in parameters(module)


def biases_by_distance(module: Any) -> bool:
    """Whether a module is attention of T5's kind, which adds to a score by distance."""
    kind: Any = type(module)
    named = hasattr(kind, "_relative_position_bucket") and "position_bias" in parameters(module)
    return named and _of_transformers(kind.__module__) and "get_interface(" in _source(kind)


def counts_in_vain(module: object) -> bool:
    """Whether positions that a module counts reach nothing but a table of positions."""
    return isinstance(module, nn.Module) and any(map(looks_up_positions, module.children()))


def pools_first(module: nn.Module) -> bool:
    """Whether a module is a pooler that takes the first token of `[B, S, H]`."""
    kind: Any = type(module)
    named = kind.__name__.endswith("Pooler") and _of_transformers(kind.__module__)
    return named and "hidden_states[:, 0]" in _source(kind)


def is_own(function: Any) -> bool:
    """Whether a function, or what a partial calls, is transformers' own."""
    return _of_transformers(getattr(function, "func", function).__module__ or "")


@lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


@lru_cache(maxsize=1024)
def _source(place: Any) -> str:
    """Source of a class or file; empty where there is none."""
    try:
        return inspect.getsource(place)
    except (OSError, TypeError):
        return ""


def _of_transformers(name: str) -> bool:
    return name == "transformers" or name.startswith("transformers.")
