"""From a whole batch to this rank's part of it, and from documents to batches."""

from lightning_cp.data.cut import Cut, cut
from lightning_cp.data.fields import Fields, find_fields
from lightning_cp.data.packing import PackedDataset, Packing, PackingCollate, TokenDataset

__all__ = [
    "Cut",
    "Fields",
    "PackedDataset",
    "Packing",
    "PackingCollate",
    "TokenDataset",
    "cut",
    "find_fields",
]
