"""Batches as named values: mappings by key, sequences by index, a bare tensor by the empty name."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from lightning_cp.errors import BatchError


def items(batch: Any) -> dict[str, Any]:
    """The values of a batch by name.

    Raises:
        BatchError: if the batch is no mapping, tuple, list or tensor.
    """
    if isinstance(batch, Tensor):
        return {"": batch}
    if isinstance(batch, Mapping):
        return {str(key): value for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return {str(index): value for index, value in enumerate(batch)}
    raise BatchError(
        f"a batch of type {type(batch).__name__} cannot be cut along the sequence; return a dict, "
        f"a tuple or a tensor from the dataset or the collate function"
    )


def rebuilt(batch: Any, values: Mapping[str, Any]) -> Any:
    """A batch of the same type with these values; the given batch is not changed."""
    if isinstance(batch, Tensor):
        return values[""]
    if isinstance(batch, Mapping):
        if not isinstance(batch, MutableMapping):
            return dict(values)
        new = copy.copy(batch)
        new.update(values)
        return new
    listed = list(values.values())
    return type(batch)(*listed) if hasattr(batch, "_fields") else type(batch)(listed)
