"""Which tensors of a batch hold one element per token, at which dimension, of which sequence."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_cp.config import MAIN, Place, SequenceDims, place_of
from lightning_cp.data.containers import has_names, is_named_tuple, items, last
from lightning_cp.errors import BatchError

LABELS = ("labels", "shift_labels", "loss_mask")
"""Fields of the tokens that are predicted."""

WELL_KNOWN = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    *LABELS,
)
"""Fields that are cut at dim 1 (batch first) without being declared, however they are nested."""

OF_DECODERS = (
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_attention_mask",
    "decoder_position_ids",
)
"""Fields of a second sequence that are cut at dim 1 without being declared."""

DECODER = "decoder"
"""Name of the sequence of these fields, where they are not declared."""

PREDICTIONS = "predictions"
"""Names in `sequence_dims` that start with this are of what `predict_step` returns."""


@dataclass(frozen=True)
class Fields:
    """What belongs to one sequence.

    Attributes:
        dims: sequence dimension of every per-token field, by name.
        length: size of the sequence.
        batch: number of rows.
        name: of the sequence.
        whole: the fields are not cut, every rank holds all of the sequence.
    """

    dims: dict[str, int]
    length: int
    batch: int
    name: str = MAIN
    whole: bool = False

    def called(self, known: str) -> list[str]:
        """Full names of the fields that stand for the well-known name, the shortest first."""
        return sorted((name for name in self.dims if self.stands_for(name) == known), key=len)

    def stands_for(self, name: str) -> str:
        """The well-known name that a field stands for, else the last part of its own.

        In a sequence with a name of its own `tgt_attention_mask` is an `attention_mask`.
        """
        own = last(name)
        if own in WELL_KNOWN or self.name == MAIN:
            return own
        known = sorted(WELL_KNOWN, key=len, reverse=True)
        return next((end for end in known if own.endswith(f"_{end}")), own)


def find_fields(
    batch: Any, declared: SequenceDims | None, *, decodes: bool = False
) -> dict[str, Fields]:
    """Find the per-token fields of a whole batch, by sequence; nothing is guessed.

    Declared fields are taken as declared. Fields whose last name is well known and which have two
    or more dimensions are cut at dim 1: those of decoders belong to a sequence of their own, and
    labels to it if there is one. Of an undeclared tuple, list or tensor without any such field, and
    of an undeclared named tuple where it holds, all tensors must have two or more dimensions and
    share the first two sizes `[B, S]`.

    Args:
        batch: the whole batch, as the loader gives it.
        declared: sequence dimensions by name.
        decodes: labels that are not declared belong to a decoder.

    Returns:
        The fields of every sequence; first those of the one without a name, if there is one.

    Raises:
        BatchError: if there is no per-token field, if lengths of one sequence differ, or if it is
            unclear whether a tensor is per token.
    """
    declared = declared or {}
    tensors = {name: value for name, value in items(batch).items() if isinstance(value, Tensor)}
    inputs = [name for name in declared if name.partition(".")[0] != PREDICTIONS]
    places = _declared(tensors, declared)
    decoder = _decoder(tensors, places, {name for name in declared if name not in places}, decodes)
    for name, tensor in tensors.items():
        own = last(name)
        if name in declared or tensor.ndim < 2 or own not in (*WELL_KNOWN, *OF_DECODERS):
            continue
        decoded = decoder and own in (*LABELS, *OF_DECODERS)
        places[name] = Place(decoder if decoded else MAIN, 1)
    unnamed = not (has_names(batch) or inputs)
    if unnamed and (not places or (is_named_tuple(batch) and _are_alike(tensors))):
        places = _alike(tensors)
    if all(place.whole for place in places.values()):
        raise BatchError(
            f"no field of the batch has a sequence dimension: {_shapes(tensors)}; name the "
            f"per-token fields, for example sequence_dims={{'tokens': 1}}, or use one of the "
            f"well-known names {', '.join(WELL_KNOWN)}"
        )
    ordered = [name for name in tensors if name in places]
    names = dict.fromkeys(places[name].sequence for name in ordered)
    found = {
        sequence: _fields(tensors, {n: p for n, p in places.items() if p.sequence == sequence})
        for sequence in sorted(names, key=lambda name: name != MAIN)
    }
    for fields in found.values():
        if not fields.whole:
            _refuse_ambiguous(tensors, fields.length, places.keys() | declared.keys())
    return found


def _decoder(
    tensors: Mapping[str, Tensor], places: Mapping[str, Place], uncut: Set[str], decodes: bool
) -> str:
    """Name of the sequence of a decoder, empty where there is none."""
    found = {name: x for name, x in tensors.items() if last(name) in OF_DECODERS and x.ndim > 1}
    fields = found.keys() - uncut
    declared = [places[name].sequence for name in found if name in places]
    return next(iter(declared), DECODER if fields or decodes else "")


def _fields(tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> Fields:
    """The fields of one sequence, which must fit together."""
    dims = {name: place.dim for name, place in places.items()}
    lengths = {name: tensors[name].shape[dim] for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(
            f"the per-token fields have different lengths {lengths}; all must have one element per "
            f"token at their sequence dimension (declare another one in sequence_dims, None for a "
            f"field that is not per token, or a name as in ('target', 1) for those of another "
            f"sequence)"
        )
    length = next(iter(lengths.values()))
    if length < 1:
        raise BatchError(f"the sequence of this batch is empty: {_shapes(tensors)}")
    rows = [tensors[name].shape[0] for name, dim in dims.items() if dim != 0]
    first = next(iter(places.values()))
    return Fields(dims, length, rows[0] if rows else 1, first.sequence, first.whole)


def _declared(tensors: Mapping[str, Tensor], declared: SequenceDims) -> dict[str, Place]:
    places = {}
    for name, value in declared.items():
        place = place_of(value)
        if place is None or name not in tensors:
            continue
        if not -tensors[name].ndim <= place.dim < tensors[name].ndim:
            raise BatchError(
                f"sequence_dims declares dim {place.dim} of {name!r}, which has shape "
                f"{tuple(tensors[name].shape)}"
            )
        places[name] = place._replace(dim=place.dim % tensors[name].ndim)
    return places


def _alike(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    if not _are_alike(tensors):
        raise BatchError(
            f"a batch without field names whose tensors do not all start with the same [B, S] is "
            f"ambiguous: {_shapes(tensors)}; say which are per token, for example "
            f"sequence_dims={{'0': 1}} for the first one only"
        )
    return dict.fromkeys(tensors, Place(MAIN, 1))


def _are_alike(tensors: Mapping[str, Tensor]) -> bool:
    shapes = {tuple(tensor.shape[:2]) for tensor in tensors.values()}
    return len(shapes) == 1 and all(tensor.ndim > 1 for tensor in tensors.values())


def _refuse_ambiguous(tensors: Mapping[str, Tensor], length: int, known: Set[str]) -> None:
    for name, tensor in tensors.items():
        if name not in known and length in tensor.shape:
            raise BatchError(
                f"field {name!r} of shape {tuple(tensor.shape)} has a dimension of the sequence "
                f"length {length}, but nobody said whether it is per token; declare "
                f"sequence_dims={{{name!r}: {list(tensor.shape).index(length)}}} to cut it, or "
                f"{{{name!r}: None}} to pass it through"
            )


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"{name or 'tensor'} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    return ", ".join(shown) or "no tensors"
