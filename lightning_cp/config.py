"""The options, validated once and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cp.errors import ConfigError

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("auto", "contiguous", "zigzag"),
    "exchange": ("auto", "allgather", "ring"),
    "attention_backend": ("auto", "reference", "sdpa"),
    "documents": ("auto", "none"),
}
"""Allowed values of the options that name something."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How sequences are cut and attention is computed.

    Attributes:
        layout: which positions a rank holds: "contiguous", "zigzag", or "auto".
        exchange: how keys and values travel: "ring", "allgather", or "auto".
        attention_backend: kernel of a tile: "sdpa", "reference", or "auto".
        documents: packed rows: "auto" refuses positions that start anew within a row, "none" lets
            all tokens of a row attend to each other.
        sequence_dims: sequence dimension by field name (index of a tuple, as a string).
        pad_to_multiple_of: dummy tokens fill a row up to a multiple of this.

    Raises:
        ConfigError: if a value is not allowed.
    """

    layout: str = "auto"
    exchange: str = "auto"
    attention_backend: str = "auto"
    documents: str = "auto"
    sequence_dims: Mapping[str, int | None] | None = None
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")
        multiple = self.pad_to_multiple_of
        if multiple is not None and not (_is_integer(multiple) and multiple > 0):
            raise ConfigError(
                f"pad_to_multiple_of={multiple!r} must be a positive integer, or None for no more "
                f"padding than two tokens per rank"
            )
        dims = self.sequence_dims
        if dims is not None and not (
            isinstance(dims, Mapping)
            and all(isinstance(name, str) for name in dims)
            and all(dim is None or _is_integer(dim) for dim in dims.values())
        ):
            raise ConfigError(
                f"sequence_dims={dims!r} must map field names to a dimension, or to None for a "
                f"field that passes through, for example {{'tokens': 1}}"
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
