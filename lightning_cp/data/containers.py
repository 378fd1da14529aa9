"""Batches and outputs as named values, however they are nested.

Mappings are named by key, dataclasses and named tuples by field, other tuples and lists by index.
Names of nested values are joined with dots, such as `inputs.input_ids`; a bare value has the empty
name.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from lightning_cp.errors import BatchError

FLAT = (str, bytes, bytearray, range)
"""Sequences that are values and not containers."""

PLAIN = (*FLAT, bool, int, float, complex, type(None))
"""What a list may hold and still be one value: text, numbers and nothing."""


def children(value: Any) -> dict[Any, Any] | None:
    """The values directly inside a container, by key, field or index; None where it is none.

    A tensor is none, and neither is text or a list of nothing but numbers and text.
    """
    if isinstance(value, (Tensor, *FLAT)):
        return None
    if isinstance(value, Mapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not isinstance(value, Sequence):
        return None
    if is_named_tuple(value):
        fields: Any = getattr(value, "_fields", ())
        return dict(zip(fields, value, strict=True))
    return None if all(isinstance(x, PLAIN) for x in value) else dict(enumerate(value))


def is_named_tuple(value: Any) -> bool:
    """Whether a value is a tuple whose places have names."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def has_names(batch: Any) -> bool:
    """Whether the values of a container have names of their own, and not only places."""
    return isinstance(batch, Mapping) or dataclasses.is_dataclass(batch)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of everything that is no container, in order."""
    found = children(value)
    if found is None:
        yield name, value
        return
    for key, child in found.items():
        yield from leaves(child, join(name, key))


def join(parent: str, key: Any) -> str:
    """Name of a value inside the container called `parent`."""
    return f"{parent}.{key}" if parent else str(key)


def last(name: str) -> str:
    """The last part of a name: `input_ids` of `inputs.input_ids`."""
    return name.rpartition(".")[2]


def items(batch: Any) -> dict[str, Any]:
    """The values of a batch by name.

    Raises:
        BatchError: if the batch is no container and no tensor, or if two values have one name.
    """
    if not isinstance(batch, Tensor) and children(batch) is None:
        raise BatchError(
            f"a batch of type {type(batch).__name__} cannot be cut along the sequence; return a "
            f"dict, a dataclass, a tuple or a tensor from the dataset or the collate function"
        )
    found: dict[str, Any] = {}
    for name, value in leaves(batch):
        if name in found:
            raise BatchError(
                f"two values of the batch are called {name!r} once names of nested containers are "
                f"joined with dots; rename a key"
            )
        found[name] = value
    return found


def rebuilt(batch: Any, values: Mapping[str, Any]) -> Any:
    """A batch of the same type with these values; the given batch is not changed.

    Args:
        batch: container or tensor.
        values: all values by name, as `items` gives them; further names inside a mapping add keys
            to it. Containers in which nothing changes are the same objects.
    """
    return _rebuilt(batch, values, "")


def _rebuilt(value: Any, values: Mapping[str, Any], name: str) -> Any:
    found = children(value)
    if found is None:
        return values[name]
    new = {key: _rebuilt(child, values, join(name, key)) for key, child in found.items()}
    if isinstance(value, Mapping):
        known = {join(name, key) for key in found}
        start = f"{name}." if name else ""
        for path, added in values.items():
            key = path.removeprefix(start)
            inside = path.startswith(start) and "." not in key
            if inside and path not in known:
                new[key] = added
    if new.keys() == found.keys() and all(new[key] is child for key, child in found.items()):
        return value
    return _with(value, new)


def _with(value: Any, new: dict[Any, Any]) -> Any:
    made: Any = type(value)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return new
    if is_named_tuple(value):
        return made(*new.values())
    if not has_names(value):
        return made(new.values())
    changed: Any = copy.copy(value)
    for key, child in new.items():
        if isinstance(value, Mapping):
            changed[key] = child
        else:
            object.__setattr__(changed, key, child)
    return changed
