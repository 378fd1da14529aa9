"""Outputs of a group of ranks put together: whole rows in their original order, each once."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.gather import all_gather, gather, gather_objects
from lightning_cp.config import SequenceDims, place_of
from lightning_cp.context import Context
from lightning_cp.data.containers import PLAIN, children, join, leaves, rebuilt
from lightning_cp.data.content import content_code
from lightning_cp.data.fields import PREDICTIONS
from lightning_cp.errors import MismatchError, RefusedError
from lightning_cp.sequences import Sequence

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative distance at which outputs of two ranks count as the same."""

WAY_OUT = (
    "return what holds a token per position as [B, S_local, ...], say its dimension in "
    "sequence_dims={'predictions.name': dim} (None for what is the same on every rank), or take "
    "the parts of every rank with predict_gather='none'"
)


class Leaf(NamedTuple):
    """What one rank says of one value of its output.

    Attributes:
        name: name, starting with `predictions`.
        kind: type, or dtype of a tensor.
        shape: of a tensor, else None.
        value: a hash of integers, two sums of floats, plain values as they are; None where values
            are not compared.
        constant: whether all elements of a tensor are equal.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    value: Any
    constant: bool


def gather_outputs(
    output: Any, context: Context, *, declared: SequenceDims, to: int | None = None
) -> Any:
    """Whole rows of everything that a step returned, dummy tokens removed.

    A tensor `[B, S_local, ...]`, or one whose sequence dimension is declared, is put together; of
    what is left, every rank must hold the same, and it passes through. Values are compared in the
    first micro-steps of a stage, shapes always. One gather of small objects, and one of tensors
    for each that is put together.

    Args:
        output: a tensor, plain value or (nested) container; every rank of the group calls.
        context: of the micro-step.
        declared: sequence dimensions by name; those of outputs start with `predictions`.
        to: the one rank that gets the output, on its CPU, or None for all ranks.

    Returns:
        The same containers with whole tensors, without gradient; None on a rank that gets nothing.

    Raises:
        MismatchError: on every rank, if a value that is not put together differs between ranks.
        RefusedError: on every rank, if it is unclear whether a tensor is a part or the same on
            every rank, or if a value is neither a tensor nor text, a number or None.
    """
    values = dict(leaves(output))
    watched = context.compare_calls
    own = [
        _described(join(PREDICTIONS, name) if name else PREDICTIONS, x, watched)
        for name, x in values.items()
    ]
    found = gather_objects(own, group=context.meta)
    structures = [[(leaf.name, leaf.kind) for leaf in leaves_] for leaves_ in found]
    if any(structure != structures[0] for structure in structures):
        _differ("outputs", structures)
    sequences = list(context.sequences.values())
    places = [_place(ranks, sequences, declared) for ranks in zip(*found, strict=True)]
    whole: dict[str, Any] = {}
    for (name, value), place in zip(values.items(), places, strict=True):
        whole[name] = value if place is None else _whole(value, context, place, to)
        if to is not None and isinstance(whole[name], Tensor):
            whole[name] = whole[name].cpu()
    return rebuilt(output, whole) if to in (None, context.rank) else None


def _described(name: str, value: Any, watched: bool) -> Leaf:
    if isinstance(value, Tensor):
        kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        constant = watched and value.numel() > 0 and bool((value == value.flatten()[0]).all())
        return Leaf(name, kind, shape, _sums(value) if watched else None, constant)
    kind = type(value).__name__
    if not isinstance(value, PLAIN) and children(value) is None and not _is_plain(value):
        kind = f"!{kind}"
    return Leaf(name, kind, None, value if watched and kind[0] != "!" else None, False)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(x, PLAIN) for x in value)


def _sums(tensor: Tensor) -> Any:
    """Equal for equal tensors; close for floats that are close."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return content_code(tensor)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().double().nan_to_num(0.0, 0.0, 0.0).flatten()
    weights = (torch.arange(flat.numel(), device=flat.device) * 7919 + 97) % 1024 / 1024 + 0.5
    return float((flat * weights).sum()), float(flat.abs().sum()), CLOSE.get(real.dtype, 1e-4)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and len(one) == 3 and isinstance(other, tuple):
        scale = one[2] * max(one[1], other[1])
        return bool(abs(one[0] - other[0]) <= scale and abs(one[1] - other[1]) <= scale)
    if isinstance(one, float) and isinstance(other, float):
        return bool(one == other or math.isclose(one, other, rel_tol=1e-4) or one != one)
    return bool(one == other)


class _Place(NamedTuple):
    """Where a value has the tokens of which sequence."""

    sequence: Sequence
    dim: int


def _place(
    ranks: tuple[Leaf, ...], sequences: list[Sequence], declared: SequenceDims
) -> _Place | None:
    """Where a value is put together; None where it passes through."""
    first = ranks[0]
    if first.kind.startswith("!"):
        raise RefusedError(
            f"{first.name} is a {first.kind[1:]}, and nobody knows how to put the parts of several "
            f"ranks together; return tensors, text, numbers and containers of them, or use "
            f"predict_gather='none'"
        )
    shapes = [leaf.shape for leaf in ranks]
    said = first.name in declared
    place = place_of(declared.get(first.name, 1))
    dim = None if place is None else place.dim
    for sequence in sequences:
        if dim is None or not _are_parts(shapes, dim, sequence.layout.sizes):
            continue
        rows = first.shape is not None and (said or first.shape[0] == sequence.batch)
        watched = first.value is not None and not first.constant and len(ranks) > 1
        if rows and not said and watched:
            _refuse_equal(ranks)
        if rows:
            return _Place(sequence, dim)
    if said and dim is not None:
        held = " or ".join(str(list(sequence.layout.sizes)) for sequence in sequences)
        raise RefusedError(
            f"sequence_dims declares dim {dim} of {first.name!r}, whose shapes are {shapes}, but "
            f"this batch has {held} tokens on the ranks of the group"
        )
    if any(shape != shapes[0] for shape in shapes):
        _differ(f"shapes of {first.name}", shapes)
    if first.value is not None and not all(_same(first.value, leaf.value) for leaf in ranks):
        values = shapes if first.shape else [leaf.value for leaf in ranks]
        _differ(f"values of {first.name}", values)
    return None


def _are_parts(shapes: list[tuple[int, ...] | None], dim: int, sizes: tuple[int, ...]) -> bool:
    """Whether every rank's tensor has its share of the sequence at `dim`, and is else alike."""
    if any(shape is None or not -len(shape) <= dim < len(shape) for shape in shapes):
        return False
    known = [list(shape or ()) for shape in shapes]
    held = tuple(shape.pop(dim) for shape in known)
    return held == sizes and all(shape == known[0] for shape in known)


def _refuse_equal(ranks: tuple[Leaf, ...]) -> None:
    if all(_same(ranks[0].value, leaf.value) and leaf.shape == ranks[0].shape for leaf in ranks):
        name, shape = ranks[0].name, ranks[0].shape
        raise RefusedError(
            f"{name} of shape {shape} may hold this rank's tokens or be one value per row: its "
            f"second size is the number of tokens of every rank, but all ranks hold the same "
            f"values; say which in sequence_dims: {{{name!r}: 1}} to put tokens together, "
            f"{{{name!r}: None}} to pass it through"
        )


def _differ(what: str, values: list[Any]) -> None:
    lines = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
    raise MismatchError(
        f"the {what} of one micro-step differ between the ranks of a context-parallel group: "
        f"{lines}; {WAY_OUT}"
    )


def _whole(tensor: Tensor, context: Context, place: _Place, to: int | None) -> Tensor | None:
    (sequence, dim), part = place, tensor.detach()
    where: dict[str, Any] = {"dim": dim, "rank": context.rank, "group": context.group}
    if to is None:
        shards = all_gather(part, sequence.layout.sizes, **where)
    else:
        shards = gather(part, sequence.layout.sizes, to=to, **where)
    if not shards:
        return None
    return sequence.layout.unshard(shards, dim=dim).narrow(dim, 0, sequence.length)
