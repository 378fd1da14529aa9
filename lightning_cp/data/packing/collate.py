"""A collate function that makes one row of the documents of a batch."""

from collections.abc import Sequence
from typing import Any

from lightning_cp.data.packing.options import LABELS, check_choice
from lightning_cp.data.packing.rounds import Part
from lightning_cp.data.packing.rows import TOKENS, Columns, document_fields, row_of
from lightning_cp.errors import BatchError


class PackingCollate:
    """Makes one row `[1, S]` of all documents of a batch, for loaders with a sampler of their own.

    Samples are documents as `PackedDataset` takes them, and rows are like its rows, of as many
    tokens as the documents have together. The sampler decides what a row holds: a batch sampler
    that adds up lengths keeps a budget.

    Args:
        labels: as `Packing.labels`.
        fields: names of further per-token fields that rows are to have.
        tokens: most tokens of a row, None for any number.

    Raises:
        ConfigError: if `labels` is unknown.
    """

    def __init__(
        self, *, labels: str = "aligned", fields: Sequence[str] = (), tokens: int | None = None
    ) -> None:
        check_choice("labels", labels, LABELS)
        self._labels, self._fields, self._tokens = labels, tuple(fields), tokens

    def __call__(self, samples: Sequence[Any]) -> Columns:
        """The row.

        Raises:
            BatchError: if a sample is no document, all are empty, or there are too many tokens.
        """
        found = [document_fields(sample, self._fields) for sample in samples]
        sizes = [len(fields[TOKENS]) for fields in found]
        if not sum(sizes):
            raise BatchError(
                f"all {len(sizes)} documents of a batch are empty; leave empty documents out of "
                f"the dataset, or use PackedDataset, which skips them"
            )
        if self._tokens is not None and sum(sizes) > self._tokens:
            raise BatchError(
                f"the {len(sizes)} documents of a batch have {sum(sizes)} tokens together, and a "
                f"row may have {self._tokens}; use smaller batches, or PackedDataset, which fills "
                f"rows"
            )
        parts = [
            (Part(key, 0, size, True), fields)
            for key, (size, fields) in enumerate(zip(sizes, found, strict=True))
            if size
        ]
        return row_of(parts, self._labels)
