"""Documents of packed rows, found in the positions of a whole batch."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_cp.config import MAIN
from lightning_cp.data.containers import last
from lightning_cp.data.fields import Fields
from lightning_cp.errors import BatchError
from lightning_cp.mask import Documents, Edges

UNDECLARED = (
    "position_ids start anew within a row, so the row holds several packed documents, and nobody "
    "said whether they may attend to each other; documents='position_ids' keeps them apart, "
    "documents='none' lets them, or pass one document per row"
)


class DocumentRules(Protocol):
    """What was declared about documents; see `lightning_cp.data.cut.Rules`."""

    @property
    def documents(self) -> str: ...

    @property
    def as_transformers(self) -> bool: ...


def find_documents(
    values: Mapping[str, Any], fields: Fields, rules: DocumentRules
) -> Documents | None:
    """Cumulative document lengths of the rows of a whole batch.

    A document begins wherever `position_ids` do not continue by 1. Under "position_ids" that holds
    for any model. Under "auto" it holds for a model of Hugging Face, and there, as in
    transformers, only in a batch without `attention_mask`.

    Args:
        values: the batch by name.
        fields: the per-token fields of one sequence of it.
        rules: what was declared.

    Returns:
        Edges that all rows share, or those of every row; None where each row is one document.

    Raises:
        BatchError: if positions start anew and nobody said what that means, or if documents are
            declared and the batch has no positions `[B, S]`.
    """
    name = next(iter(fields.called("position_ids")), "position_ids")
    found = values.get(name)
    positions = found if isinstance(found, Tensor) and name in fields.dims else None
    others = [values[other] for other in fields.called("position_ids")[1:]]
    if any(not torch.equal(other, values[name]) for other in others):
        raise BatchError(
            f"{', '.join(fields.called('position_ids'))} differ, but they belong to one sequence; "
            f"pass one of them"
        )
    if rules.documents == "position_ids":
        if positions is None or positions.ndim != 2:
            shape = tuple(found.shape) if isinstance(found, Tensor) else None
            raise BatchError(
                f"documents='position_ids' needs position_ids of shape [B, S] in the batch, which "
                f"start anew with every document; got {shape}"
            )
        return _edges(positions, fields)
    if rules.documents != "auto" or positions is None:
        return None
    if rules.as_transformers and positions.ndim == 2:
        return None if _masked(values, fields) else _edges(positions, fields)
    if bool((positions.movedim(fields.dims[name], -1).diff(dim=-1) < 0).any()):
        raise BatchError(UNDECLARED)
    return None


def known_documents(edges: Edges, rules: DocumentRules) -> Documents | None:
    """What `find_documents` finds in a row whose positions start anew at `edges`.

    Args:
        edges: cumulative lengths of the documents of the row.
        rules: what was declared.

    Raises:
        BatchError: if there are several documents and nobody said what that means.
    """
    if rules.documents == "none" or len(edges) == 2:
        return None
    if rules.documents == "auto" and not rules.as_transformers:
        raise BatchError(UNDECLARED)
    return edges


def _masked(values: Mapping[str, Any], fields: Fields) -> bool:
    if fields.name != MAIN:
        return bool(fields.called("attention_mask"))
    return any(last(name) == "attention_mask" and x is not None for name, x in values.items())


def _edges(positions: Tensor, fields: Fields) -> Documents | None:
    starts = (positions.diff(dim=1) != 1).cpu()
    rows = tuple(
        (0, *(1 + row.nonzero().flatten()).tolist(), fields.length)
        for row in starts.expand(fields.batch, -1)
    )
    if len(set(rows)) > 1:
        return rows
    return None if len(rows[0]) == 2 else rows[0]
