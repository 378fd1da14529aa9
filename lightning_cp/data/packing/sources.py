"""Documents of the datasets that users bring, in the order of an epoch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_cp.compat import outside_worker
from lightning_cp.data.packing.rounds import Document, Part
from lightning_cp.data.packing.rows import TOKENS, Columns, document_fields
from lightning_cp.errors import BatchError, ConfigError


class Source:
    """Documents of a dataset, map-style or iterable.

    Args:
        dataset: gives documents; see `document_fields`.
        lengths: tokens of every document of a map-style dataset; where not given, every process
            reads every document to know it.
        names: further per-token fields of rows.
        shuffle: another order of a map-style dataset in every epoch.
        seed: of that order.

    Raises:
        ConfigError: if an iterable dataset is to be shuffled, or if there are lengths of other
            documents than the dataset has.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        lengths: Sequence[int] | None,
        names: Sequence[str],
        shuffle: bool,
        seed: int,
    ) -> None:
        self._dataset, self._names = dataset, tuple(names)
        self._lengths, self._shuffle, self._seed = lengths, shuffle, seed
        self._last: tuple[int, Columns] | None = None
        self._mapped = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
        if not self._mapped and (shuffle or lengths is not None):
            raise ConfigError(
                f"{type(dataset).__name__} is iterable: its documents come in its own order and "
                f"their lengths are not known before; shuffle there, and pass neither shuffle=True "
                f"nor lengths"
            )
        if self._mapped and lengths is not None and len(lengths) != len(dataset):
            raise ConfigError(
                f"{len(lengths)} lengths for {len(dataset)} documents; pass the number of tokens "
                f"of every document"
            )

    def documents(self, epoch: int) -> Iterator[Document]:
        """The documents of an epoch, with their contents where they had to be read."""
        if not self._mapped:
            return self._streamed(epoch)
        keys = order(len(self._dataset), self._shuffle, self._seed, epoch)
        return (self._found(key) for key in keys)

    def fields(self, part: Part) -> Columns:
        """The fields of the whole document of which a row holds a part.

        Raises:
            BatchError: if the document has another length than was said.
        """
        if part.data is not None:
            found: Columns = part.data
            return found
        if self._last is None or self._last[0] != part.key:
            self._last = part.key, self._read(part.key)
        fields = self._last[1]
        said = None if self._lengths is None else int(self._lengths[part.key])
        if len(fields[TOKENS]) != said:
            raise BatchError(
                f"document {part.key} has {len(fields[TOKENS])} tokens, and lengths says {said}; "
                f"pass lengths as they are"
            )
        return fields

    def _found(self, key: int) -> Document:
        if self._lengths is not None:
            return Document(key, int(self._lengths[key]))
        fields = self._read(key)
        return Document(key, len(fields[TOKENS]), fields)

    def _read(self, key: int) -> Columns:
        return document_fields(self._dataset[key], self._names)

    def _streamed(self, epoch: int) -> Iterator[Document]:
        """All documents of a stream, in every process: no worker may take a share of its own."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with outside_worker():
            samples = iter(self._dataset)
        key = 0
        while True:
            with outside_worker():
                sample = next(samples, samples)
            if sample is samples:
                return
            fields = document_fields(sample, self._names)
            yield Document(key, len(fields[TOKENS]), fields)
            key += 1


def order(count: int, shuffle: bool, seed: int, epoch: int) -> Iterator[int]:
    """The order of an epoch, the same in every process."""
    if not shuffle:
        return iter(range(count))
    dice = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return map(int, torch.randperm(count, generator=dice))
