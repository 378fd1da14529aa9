"""The options, validated once and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_cp.balance import Balanced
from lightning_cp.errors import ConfigError
from lightning_cp.plan import (
    AllGather,
    Direct,
    Exchange,
    Hybrid,
    Replicated,
    Ring,
    Ulysses,
    schedule_of,
)

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("auto", "balanced", "contiguous", "per_document_zigzag", "zigzag"),
    "exchange": ("auto", "allgather", "direct", "hybrid", "ring", "ulysses"),
    "attention_backend": (
        *("auto", "cudnn", "efficient", "flash", "flash_attn", "flash_attn_3"),
        *("flash_attn_4", "flex", "reference", "sdpa"),
    ),
    "attention_dropout": ("refuse", "tile", "off"),
    "verify": ("off", "first_batch"),
    "documents": ("auto", "position_ids", "none"),
    "loss": ("auto", "token_mean"),
    "data": ("check", "broadcast"),
    "shard_in": ("auto", "worker", "main"),
    "predict_gather": ("rank0_cpu", "all", "none"),
    "accumulate_gradients": ("auto", "whole", "parts"),
    "param_gather": ("auto", "fsdp", "early", "after_attention"),
}
"""Allowed values of the options that name something."""

MADE: dict[str, tuple[tuple[type, ...], str]] = {
    "layout": ((Balanced,), ", or Balanced() of lightning_cp.balance"),
    "exchange": (
        (AllGather, Direct, Hybrid, Replicated, Ring, Ulysses),
        ", or Direct(), Ring(), AllGather(), Ulysses(), Hybrid() or Replicated() of "
        "lightning_cp.plan",
    ),
}
"""Options that also take an object: its classes, and how a message calls them."""

MAIN = "sequence"
"""Name of the sequence of fields that name none."""

WHOLE = "whole"
"""Word that says in `sequence_dims` that every rank holds a sequence as it is."""

SequenceDim = int | tuple[str, int] | tuple[str, int, str] | None
"""Where a field has its tokens: a dimension; with the name of its sequence; with "whole" too.

None: the field passes through untouched.
"""

SequenceDims = Mapping[str, SequenceDim]
"""By field name. The name of a value in a tuple or list is its index, as a string; names of nested
containers are joined with dots.
"""


class Place(NamedTuple):
    """Where a field has the tokens of a sequence.

    Attributes:
        sequence: name of the sequence.
        dim: dimension of the tokens.
        whole: every rank holds all tokens.
    """

    sequence: str
    dim: int
    whole: bool = False


def place_of(value: SequenceDim) -> Place | None:
    """What one value of `sequence_dims` says; None for a field that passes through."""
    if value is None:
        return None
    if isinstance(value, int):
        return Place(MAIN, value)
    return Place(value[0], value[1], len(value) == 3)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How sequences are cut and attention is computed.

    Attributes:
        layout: which positions a rank holds: "contiguous"; "zigzag"; "per_document_zigzag", zigzag
            within every document; "balanced", short documents whole on one rank and long ones on
            as few as even work and tokens allow; "auto", for every batch what suits it; or
            `lightning_cp.balance.Balanced` with options.
        exchange: how keys and values travel: "direct", exactly what a rank's queries see, from the
            rank that holds it; "ring", from neighbour to neighbour; "allgather", all to all;
            "ulysses", none, ranks swap heads for tokens; "hybrid", neighbours swap heads and
            blocks of them exchange keys; "auto", for every batch what is predicted to take least
            time; or one of `lightning_cp.plan.Direct`, `Ring`, `AllGather`, `Ulysses`, `Hybrid`
            with options; for debugging `Replicated()`, with which every rank computes all, and
            attention has the same bits whatever the group.
        overlap: messages travel while tiles are computed; False, for comparison, posts them when
            they are due.
        attention_backend: kernel of a tile: "sdpa", the first of torch's fused kernels that fits
            (that for CPUs, "flash", "efficient"); one of these, "cudnn", "flash_attn",
            "flash_attn_3" or "flash_attn_4" by name; "flex", for calls with a mask_mod;
            "reference"; or "auto", "sdpa" with "flash_attn" after "flash", and "flex" before
            "reference" for what these do not compute.
        attention_dropout: what dropout of a swapped call's weights does: "refuse"; "tile", it drops
            by numbers of the call, the rank and the block, which the backward and recomputation
            repeat; "off", nothing is dropped.
        documents: packed rows: "position_ids" keeps documents apart, which begin wherever the
            batch's `position_ids` do not continue by 1; "none" lets all tokens of a row attend to
            each other; "auto" does for models of Hugging Face what that version of transformers
            does on one device, and refuses positions that start anew for any other model.
        loss: what a step returns: "auto", a loss over the whole group, which must be the same on
            every rank; "token_mean", a mean over local tokens that is still to be averaged.
        sequence_dims: sequence dimension by field name (index of a tuple, as a string), with the
            name of the sequence where a batch holds several: `("tgt", 1)`; with "whole" where
            every rank keeps it as it is: `("image", 1, "whole")`.
        pad_to_multiple_of: dummy tokens fill a row up to a multiple of this.
        data: "check": every rank reads the batches, and they are compared; "broadcast": the first
            rank of a group reads them for the others.
        shard_in: where batches are cut: "worker", in the collate functions of loaders; "main",
            after the hooks that transfer a batch; "auto", in the workers of loaders that have any
            unless something needs whole batches.
        predict_gather: who gets whole rows of predictions: "rank0_cpu", the first rank of a group;
            "all"; or "none", every rank keeps its part.
        zero_stage: what is in parts on the ranks: 0, nothing; 1, parameters and the state of
            optimizers between steps; 2, also gradients; 3, also parameters between the forward and
            the backward of a block.
        accumulate_gradients: what gradients are in between the micro-steps of a step: "whole",
            added up on every rank; "parts", added up over the ranks; "auto".
        param_gather: when the parameters of the next block are gathered: "fsdp", "early",
            "after_attention", or "auto"; see `lightning_cp.gathers.Gathers`.
        verify: "first_batch" compares the first training step with that of one device; "off".

    Raises:
        ConfigError: if a value is not allowed.
    """

    layout: str | Balanced = "auto"
    exchange: str | Exchange = "auto"
    overlap: bool = True
    attention_backend: str = "auto"
    attention_dropout: str = "refuse"
    documents: str = "auto"
    loss: str = "auto"
    sequence_dims: SequenceDims | None = None
    pad_to_multiple_of: int | None = None
    zero_stage: int = 0
    param_gather: str = "auto"
    accumulate_gradients: str = "auto"
    verify: str = "off"
    data: str = "check"
    shard_in: str = "auto"
    predict_gather: str = "rank0_cpu"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            kinds, made = MADE.get(name, ((), ""))
            if not isinstance(value, kinds) and value not in allowed:
                raise ConfigError(
                    f"{name}={value!r} is unknown; use one of {', '.join(allowed)}{made}"
                )
        if isinstance(self.zero_stage, bool) or self.zero_stage not in range(4):
            raise ConfigError(
                f"zero_stage={self.zero_stage!r}: use 0 (every rank holds everything), 1 (state of "
                f"optimizers in parts), 2 (gradients, too) or 3 (parameters, too)"
            )
        if self.accumulate_gradients == "parts" and self.zero_stage < 2:
            raise ConfigError(
                f"accumulate_gradients='parts' keeps gradients in parts, which zero_stage="
                f"{self.zero_stage} does not; use zero_stage=2 or 3, or leave it out"
            )
        whole = {"data": "broadcast", "verify": "first_batch"}
        for name, value in whole.items():
            if self.shard_in == "worker" and getattr(self, name) == value:
                raise ConfigError(
                    f"shard_in='worker' cuts batches where they are loaded, but {name}={value!r} "
                    f"needs them whole; use shard_in='auto' or 'main'"
                )
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap={self.overlap!r} must be True or False")
        multiple = self.pad_to_multiple_of
        if multiple is not None and not (_is_integer(multiple) and multiple > 0):
            raise ConfigError(
                f"pad_to_multiple_of={multiple!r} must be a positive integer, or None for no more "
                f"padding than two tokens per rank"
            )
        _check_dims(self.sequence_dims)

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients stay whole while they are accumulated: by itself up to stage 1."""
        wanted = self.accumulate_gradients
        return self.zero_stage < 2 if wanted == "auto" else wanted == "whole"

    def check(self, world: int) -> None:
        """Refuse a layout or an exchange for another number of ranks than `world`.

        Raises:
            ConfigError: if speeds of ranks are not as many, or blocks of ranks do not make up the
                group.
        """
        if isinstance(self.layout, Balanced):
            self.layout.shares(world)
        if self.exchange != "auto":
            schedule_of(self.exchange).block(world)


def _check_dims(dims: Any) -> None:
    """Refuse what is no `SequenceDims`."""
    if dims is None:
        return
    named = isinstance(dims, Mapping) and all(isinstance(name, str) for name in dims)
    if not named or not all(_is_place(value) for value in dims.values()):
        raise ConfigError(
            f"sequence_dims={dims!r} must map field names to a dimension, for example "
            f"{{'tokens': 1}}; to the name of its sequence and a dimension where a batch holds "
            f"several, {{'tgt': ('target', 1)}}; to these and 'whole' where every rank keeps it, "
            f"{{'image': ('image', 1, 'whole')}}; or to None for a field that passes through"
        )
    places = [place for place in map(place_of, dims.values()) if place is not None]
    for name in {place.sequence for place in places}:
        if len({place.whole for place in places if place.sequence == name}) > 1:
            raise ConfigError(
                f"sequence_dims={dims!r} declares sequence {name!r} both cut and whole; say "
                f"'whole' of all of its fields or of none"
            )


def _is_place(value: Any) -> bool:
    if value is None or _is_integer(value):
        return True
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        return False
    named = isinstance(value[0], str) and value[0] != "" and _is_integer(value[1])
    return named and tuple(value[2:]) in ((), (WHOLE,))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
