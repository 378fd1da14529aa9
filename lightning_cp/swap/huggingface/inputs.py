"""Inputs that a model would otherwise make for itself from the local length."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cp import functional
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap.huggingface.models import (
    is_decoded,
    loaded,
    makes_positions,
    parameters,
    shifted_right,
)
from lightning_cp.swap.where import caller

CACHES = ("past_key_values", "cache", "layer_past")
DECODED = ("decoder_input_ids", "decoder_inputs_embeds")
SPANS = ("start_positions", "end_positions")
LIMITS = ("original_max_seq_len", "max_seq_len_cached")

Call = tuple[tuple[Any, ...], dict[str, Any]]


class ByDistance(NamedTuple):
    """What is added to scores: numbers `[H, N]`, the middle one for a distance of 0; None: 0."""

    numbers: Tensor | None


def filling(model: nn.Module) -> Callable[..., Call | None]:
    """The pre-hook of a model, see `fill_inputs`; what sources say is read now, not in graphs."""
    return partial(fill_inputs, names=parameters(model), counts=makes_positions(model))


def fill_inputs(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    names: tuple[str, ...],
    counts: bool,
) -> Call | None:
    """Pre-hook of a `PreTrainedModel`: in a context, positions are global and no cache is made.

    Where the forward takes `position_ids` or `cache_position` and the caller gave none, they are
    the global positions of the local tokens, `[1, S_local]` and `[S_local]`. Token types that a
    model of BERT's kind looks up in a table of its own are looked up there by global position. An
    encoder-decoder that makes the inputs of its decoder from labels gets them made from the labels
    of whole rows.

    Args:
        module: the model.
        args: positional arguments of the call.
        kwargs: its other arguments.
        names: of the parameters of its forward.
        counts: whether the model makes positions of its own.

    Returns:
        The arguments of the call, None where nothing changes.

    Raises:
        RefusedError: for a call that would be wrong on a part of the sequence.
    """
    context = SLOT.current
    if context is None:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    _refuse(context, module, given, tokens)
    fills: dict[str, Any] = {}
    if isinstance(tokens, Tensor):
        positions = functional.positions(tokens.shape[1], device=tokens.device)
        table = getattr(getattr(module, "embeddings", None), "token_type_ids", None)
        if isinstance(table, Tensor):
            fills["token_type_ids"] = table[:, positions].expand(tokens.shape[0], -1)
        if not counts:
            fills["position_ids"] = positions.unsqueeze(0)
    if "decoder_input_ids" in names and is_decoded(module):
        fills["decoder_input_ids"] = _from_labels(context, module, given)
        decoded = next((given[name] for name in DECODED if given.get(name) is not None), None)
        tokens = fills["decoder_input_ids"] if decoded is None else decoded
    if isinstance(tokens, Tensor):
        fills["cache_position"] = functional.positions(tokens.shape[1], device=tokens.device)
        fills |= {} if _decides(context, tokens.shape[1]) else {"use_cache": False}
    filled = list(args)
    for name, value in fills.items():
        if name not in names or given.get(name) is not None or value is None:
            continue
        if names.index(name) < len(filled):
            filled[names.index(name)] = value
        else:
            kwargs = {**kwargs, name: value}
    return tuple(filled), kwargs


def pool_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Pre-hook of a pooler: `[B, S_local, H]` becomes the first token of every row, `[B, 1, H]`.

    Every rank gets the same token; the gradient goes back to the rank that holds it.
    """
    if SLOT.current is None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    first = functional.positions(hidden.shape[1], device=hidden.device) == 0
    chosen = torch.where(first[None, :, None], hidden, 0)
    found = functional.sequence_sum(chosen, dim=1, keepdim=True)
    return ((found, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": found})


def bias_by_distance(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Pre-hook of attention of T5's kind: a number by head and distance as its bias.

    The module would make one for every pair of local tokens, numbered from 0, also where all are 0.
    What it is given it passes on to its attention function and to the layers that share the bias.
    """
    if SLOT.current is None:
        return None
    given = dict(zip(parameters(module), args, strict=False)) | kwargs
    if given.get("position_bias") is not None:
        return None
    bias = ByDistance(None)
    if module.has_relative_attention_bias:
        far = module.relative_attention_max_distance
        buckets = module._relative_position_bucket(
            torch.arange(-far, far + 1, device=given["hidden_states"].device),
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=far,
        )
        bias = ByDistance(module.relative_attention_bias(buckets).T)
    place = parameters(module).index("position_bias")
    if place < len(args):
        return (*args[:place], bias, *args[place + 1 :]), kwargs
    return args, {**kwargs, "position_bias": bias}


def refuse_rescaling(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook of a rotary embedding whose frequencies depend on the longest row of a call.

    Raises:
        RefusedError: if the sequence is so long that they would change: ranks would disagree.
    """
    context = SLOT.current
    if context is None:
        return
    limits = [int(getattr(module, name)) for name in LIMITS if hasattr(module, name)]
    longest = max(sequence.length for sequence in context.sequences.values())
    if limits and longest > min(limits):
        raise RefusedError(
            f"{caller(context)}: rotary embeddings of type {getattr(module, 'rope_type', '')!r} "
            f"change their frequencies past {min(limits)} tokens, and a rank sees only its own of "
            f"{longest}; use a type with fixed frequencies (linear, yarn, llama3)"
        )


def place_globally(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Pre-hook of a table of positions: in a context those of local tokens are global.

    The table is called with tokens `[B, S_local, ...]` or their shape, and with positions that were
    counted from the local length, or none.
    """
    if SLOT.current is None:
        return None
    given = dict(zip(parameters(module), args, strict=False)) | kwargs
    tokens, counted = given[parameters(module)[0]], given.get("position_ids")
    size = (tokens.shape if isinstance(tokens, Tensor) else tokens)[1]
    positions = functional.positions(size, device=next(module.parameters()).device)
    place = parameters(module).index("position_ids")
    found = positions if counted is None else positions.expand(counted.shape)
    if place < len(args):
        return (*args[:place], found, *args[place + 1 :]), kwargs
    return args, {**kwargs, "position_ids": found}


def _from_labels(context: Context, module: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Inputs of a decoder where a call has labels `[B, S_local]` and none of `DECODED`."""
    labels = given.get("labels")
    missing = all(given.get(name) is None for name in DECODED)
    if not missing or not isinstance(labels, Tensor) or labels.ndim != 2:
        return None
    layout = context.sequence_of(labels.shape[1]).layout
    whole = functional.gather_sequence(labels, dim=1)
    with SLOT.suspend():
        made = shifted_right(module, whole)
        dummies = made.new_zeros(len(made), layout.length - whole.shape[1])
        return layout.shard(torch.cat([made, dummies], 1), rank=context.rank, dim=1)


def _decides(context: Context, size: int) -> bool:
    """Whether the model's own choice about a cache decides if documents are kept apart."""
    found = list(context.sequences.values())
    if not torch.compiler.is_compiling():  # a graph is for all lengths
        found = [s for s in found if s.layout.size(context.rank) == size]
    return any(s.as_transformers and s.documents is not None for s in found)


def _refuse(context: Context, module: nn.Module, given: dict[str, Any], tokens: Any) -> None:
    config = getattr(module, "config", None)
    wrong = ""
    if any(given.get(name) is not None for name in CACHES):
        wrong = (
            "a cache holds keys of whole sequences, and this rank has a part of one; generate in "
            "functional.local(), on whole rows"
        )
    elif any(given.get(name) is not None for name in SPANS):
        wrong = (
            "start_positions and end_positions choose among the tokens of the whole row, and this "
            "rank has a part of them; compute that loss on functional.gather_sequence(logits)"
        )
    elif isinstance(tokens, Tensor) and tokens.ndim != 2 + (given.get("input_ids") is None):
        wrong = (
            f"tokens of shape {tuple(tokens.shape)}; pass input_ids [B, S] or inputs_embeds "
            f"[B, S, H], with choices folded into the batch"
        )
    elif _is_eager(config):
        wrong = (
            "this version of transformers does not let eager attention be replaced; load the "
            "model with attn_implementation='sdpa'"
        )
    if wrong:
        raise RefusedError(f"{caller(context)}: {wrong}")


def _is_eager(config: Any) -> bool:
    utils = loaded("modeling_utils")
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return eager and utils is not None and not hasattr(utils.AttentionInterface, "get_interface")
