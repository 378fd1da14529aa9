"""Packing: documents put into rows of many tokens, without padding.

`PackedDataset` fills rows from any dataset of documents, `TokenDataset` from files of tokens, of
which every rank reads only its own; `PackingCollate` makes one row of the documents of a batch.
"""

from lightning_cp.data.packing.collate import PackingCollate
from lightning_cp.data.packing.dataset import PackedDataset
from lightning_cp.data.packing.options import Packing
from lightning_cp.data.packing.tokens import TokenDataset

__all__ = ["PackedDataset", "Packing", "PackingCollate", "TokenDataset"]
