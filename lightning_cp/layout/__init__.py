"""Layouts: which global token positions each rank of a context-parallel group holds.

`LAYOUTS` names the constructors that know nothing but `(length, world)`; `per_document_zigzag`
takes the lengths of documents.
"""

from collections.abc import Callable

from lightning_cp.layout.base import Layout
from lightning_cp.layout.contiguous import contiguous
from lightning_cp.layout.documents import per_document_zigzag
from lightning_cp.layout.zigzag import zigzag

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
}

__all__ = ["LAYOUTS", "Layout", "contiguous", "per_document_zigzag", "zigzag"]
