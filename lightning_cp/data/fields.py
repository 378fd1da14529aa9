"""Which tensors of a batch hold one element per token, and at which dimension."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_cp.data.containers import has_names, is_named_tuple, items, last
from lightning_cp.errors import BatchError

SequenceDims = Mapping[str, int | None]
"""Field name to its sequence dimension; None: passes through untouched.

The name of a value in a tuple or list is its index, as a string; names of nested containers are
joined with dots.
"""

WELL_KNOWN = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "labels",
    "shift_labels",
    "loss_mask",
)
"""Fields that are cut at dim 1 (batch first) without being declared, however they are nested."""

PREDICTIONS = "predictions"
"""Names in `sequence_dims` that start with this are of what `predict_step` returns."""


@dataclass(frozen=True)
class Fields:
    """What is cut.

    Attributes:
        dims: sequence dimension of every per-token field, by name.
        length: size of the sequence.
        batch: number of rows.
    """

    dims: dict[str, int]
    length: int
    batch: int

    def called(self, known: str) -> list[str]:
        """Full names of the per-token fields whose last name is `known`, the shortest first."""
        return sorted((name for name in self.dims if last(name) == known), key=len)


def find_fields(batch: Any, declared: SequenceDims | None) -> Fields:
    """Find the per-token fields of a whole batch; nothing is guessed.

    Declared fields are taken as declared. Fields whose last name is well known and which have two
    or more dimensions are cut at dim 1. Of an undeclared tuple, list or tensor without any such
    field, and of an undeclared named tuple where it holds, all tensors must have two or more
    dimensions and share the first two sizes `[B, S]`.

    Args:
        batch: the whole batch, as the loader gives it.
        declared: sequence dimensions by name.

    Raises:
        BatchError: if there is no per-token field, if lengths differ, or if it is unclear whether
            a tensor is per token.
    """
    tensors = {name: value for name, value in items(batch).items() if isinstance(value, Tensor)}
    inputs = [name for name in declared or () if name.partition(".")[0] != PREDICTIONS]
    dims = _declared(tensors, declared or {})
    for name, tensor in tensors.items():
        if last(name) in WELL_KNOWN and name not in (declared or {}) and tensor.ndim > 1:
            dims[name] = 1
    unnamed = not (has_names(batch) or inputs)
    if unnamed and (not dims or (is_named_tuple(batch) and _are_alike(tensors))):
        dims = _alike(tensors)
    if not dims:
        raise BatchError(
            f"no field of the batch has a sequence dimension: {_shapes(tensors)}; name the "
            f"per-token fields, for example sequence_dims={{'tokens': 1}}, or use one of the "
            f"well-known names {', '.join(WELL_KNOWN)}"
        )
    lengths = {name: tensors[name].shape[dim] for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(
            f"the per-token fields have different lengths {lengths}; all must have one element per "
            f"token at their sequence dimension (declare another one in sequence_dims, or None for "
            f"a field that is not per token)"
        )
    length = next(iter(lengths.values()))
    if length < 1:
        raise BatchError(f"the sequence of this batch is empty: {_shapes(tensors)}")
    _refuse_ambiguous(tensors, dims, length, declared or {})
    rows = [tensors[name].shape[0] for name, dim in dims.items() if dim != 0]
    return Fields(dims, length, rows[0] if rows else 1)


def _declared(tensors: Mapping[str, Tensor], declared: SequenceDims) -> dict[str, int]:
    dims = {}
    for name, dim in declared.items():
        if dim is None or name not in tensors:
            continue
        if not -tensors[name].ndim <= dim < tensors[name].ndim:
            raise BatchError(
                f"sequence_dims declares dim {dim} of {name!r}, which has shape "
                f"{tuple(tensors[name].shape)}"
            )
        dims[name] = dim % tensors[name].ndim
    return dims


def _alike(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    if not _are_alike(tensors):
        raise BatchError(
            f"a batch without field names whose tensors do not all start with the same [B, S] is "
            f"ambiguous: {_shapes(tensors)}; say which are per token, for example "
            f"sequence_dims={{'0': 1}} for the first one only"
        )
    return dict.fromkeys(tensors, 1)


def _are_alike(tensors: Mapping[str, Tensor]) -> bool:
    shapes = {tuple(tensor.shape[:2]) for tensor in tensors.values()}
    return len(shapes) == 1 and all(tensor.ndim > 1 for tensor in tensors.values())


def _refuse_ambiguous(
    tensors: Mapping[str, Tensor], dims: Mapping[str, int], length: int, declared: SequenceDims
) -> None:
    for name, tensor in tensors.items():
        if name not in dims and name not in declared and length in tensor.shape:
            raise BatchError(
                f"field {name!r} of shape {tuple(tensor.shape)} has a dimension of the sequence "
                f"length {length}, but nobody said whether it is per token; declare "
                f"sequence_dims={{{name!r}: {list(tensor.shape).index(length)}}} to cut it, or "
                f"{{{name!r}: None}} to pass it through"
            )


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"{name or 'tensor'} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    return ", ".join(shown) or "no tensors"
