"""Columns of rows of documents, and what a sample of a dataset holds of a document."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_cp.data.packing.rounds import Part
from lightning_cp.data.valid import IGNORED
from lightning_cp.errors import BatchError
from lightning_cp.mask import Edges

TOKENS, LABELS, SHIFTED, POSITIONS = "input_ids", "labels", "shift_labels", "position_ids"
MADE = (TOKENS, LABELS, SHIFTED, POSITIONS)
"""Columns of rows that are made here, whatever else a document has."""

Columns = dict[str, Tensor]


def label_names(style: str) -> tuple[str, ...]:
    """Names of the labels that a row has; see `Packing.labels`."""
    return (LABELS,) if style == "aligned" else (LABELS, SHIFTED)


def document_fields(sample: Any, names: Sequence[str] = ()) -> Columns:
    """The per-token fields of one document.

    Args:
        sample: the tokens, as a tensor, array, list or bytes of one dimension; or a mapping with
            `input_ids`, maybe `labels` (of the same tokens, not shifted, -100 for those that are
            not to be predicted) and further fields, which are left out unless named. Its
            `attention_mask` may hide nothing.
        names: further per-token fields that rows are to have.

    Returns:
        1-D tensors of one length; tokens and labels int64.

    Raises:
        BatchError: if a field is missing, has another length or dimension, or if tokens are
            padding.
    """
    values = sample if isinstance(sample, Mapping) else {TOKENS: sample}
    wanted = [TOKENS, *(name for name in (LABELS,) if name in values), *names]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise BatchError(
            f"a document has the fields {', '.join(map(str, values))}, but not {missing[0]!r}; "
            f"return the tokens, or a dict with 'input_ids' and every field that rows are to have"
        )
    found = {name: _flat(values[name], name) for name in wanted}
    lengths = {name: len(value) for name, value in found.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(
            f"the fields of a document have different lengths {lengths}; all must have one element "
            f"for every token"
        )
    mask = values.get("attention_mask")
    if mask is not None and not bool((torch.as_tensor(mask) != 0).all()):
        raise BatchError(
            "the attention_mask of a document hides tokens: rows are packed so that nothing is "
            "padded; return documents of their own length (padding=False in a tokenizer)"
        )
    return found


def _flat(value: Any, name: str) -> Tensor:
    if isinstance(value, bytes | bytearray):
        value = torch.frombuffer(bytearray(value or b"0"), dtype=torch.uint8)[: len(value)]
    tensor = torch.as_tensor(value)
    if tensor.ndim != 1:
        raise BatchError(
            f"{name} of a document has shape {tuple(tensor.shape)}; a document is one sequence of "
            f"tokens, return it without a batch dimension"
        )
    if name not in MADE:
        return tensor
    if len(tensor) and (tensor.is_floating_point() or tensor.is_complex()):
        raise BatchError(f"{name} of a document has dtype {tensor.dtype}; tokens are integers")
    return tensor.long()


def row_of(parts: Iterable[tuple[Part, Columns]], style: str) -> Columns:
    """One row of documents, each with positions from 0.

    Args:
        parts: what the row holds, and the fields of the whole document of each.
        style: of labels; see `Packing.labels`.

    Returns:
        Every field as `[1, S]`; a row without tokens has one, 0, that predicts nothing.
    """
    found = [_fields(part, fields, style) for part, fields in parts]
    return joined(found or [dummies(1, style)])


def _fields(part: Part, document: Columns, style: str) -> Columns:
    start, stop = part.start, part.stop
    own = document.get(LABELS, document[TOKENS])[start : stop + (not part.ends)]
    made = columns(document[TOKENS][start:stop], own, first=0, style=style)
    return made | {name: x[start:stop] for name, x in document.items() if name not in MADE}


def dummy(style: str) -> dict[str, int]:
    """Values of a token that stands for nothing."""
    return {TOKENS: 0, **dict.fromkeys(label_names(style), IGNORED), POSITIONS: 0}


def columns(tokens: Tensor, own: Tensor, *, first: int, style: str) -> Columns:
    """Columns of tokens that follow each other in one document of a row.

    Args:
        tokens: int64 `[n]`.
        own: their labels, not shifted, and that of the next token unless the document ends.
        first: position of the first token in the document.
        style: of labels; see `Packing.labels`.
    """
    following = own[1:]
    following = torch.cat([following, following.new_full((1 + len(tokens) - len(own),), IGNORED)])
    made = {TOKENS: tokens}
    if style == "aligned":
        made[LABELS] = following
    else:
        made[LABELS] = own[: len(tokens)].clone()
        if first == 0:
            made[LABELS][0] = IGNORED  # no token of this row predicts it
        made[SHIFTED] = following
    made[POSITIONS] = torch.arange(first, first + len(tokens))
    return made


def joined(found: Iterable[Columns]) -> Columns:
    """Columns `[1, S]` of runs of tokens, in order."""
    gathered: dict[str, list[Tensor]] = {}
    for fields in found:
        for name, column in fields.items():
            gathered.setdefault(name, []).append(column)
    return {name: torch.cat(parts).unsqueeze(0) for name, parts in gathered.items()}


def dummies(count: int, style: str) -> Columns:
    """Columns of tokens that stand for nothing."""
    return {name: torch.full((count,), value) for name, value in dummy(style).items()}


def edges_of(parts: Iterable[Part]) -> Edges:
    """Cumulative lengths of the documents of a row."""
    return (0, *accumulate(part.size for part in parts))
