"""Packed rows of token files, of which every rank reads only its own tokens."""

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_cp.data.collate import ShardedBatch, Share, Uncut, planned, sharded
from lightning_cp.data.cut import Cut, cut, exchange_of, lay_out
from lightning_cp.data.documents import known_documents
from lightning_cp.data.fields import Fields
from lightning_cp.data.packing.dataset import Rows
from lightning_cp.data.packing.files import TokenFiles
from lightning_cp.data.packing.options import Packing
from lightning_cp.data.packing.rounds import Document, Part, Row
from lightning_cp.data.packing.rows import (
    Columns,
    columns,
    dummies,
    dummy,
    edges_of,
    joined,
    row_of,
)
from lightning_cp.data.packing.sources import order
from lightning_cp.errors import BatchError
from lightning_cp.sequences import Sequence as Tokens
from lightning_cp.spans import Spans

Paths = str | Path | Sequence[str | Path]


class TokenDataset(Rows):
    """Rows of documents in token files, cut as they are read: `DataLoader(..., batch_size=None)`.

    Rows are those of `PackedDataset` over the same documents. Under a `ContextParallelStrategy`
    every rank lays a row out from the lengths of its documents, reads its own tokens of the mapped
    files and no others, and gives a `ShardedBatch`: a whole row is nowhere in memory. Rows are read
    whole where there is one rank in the group, or where something needs whole batches (see
    `shard_in`); the start table says so.

    Args:
        files: one or more files of tokens, one after the other, without a header.
        packing: how rows are filled, or only their most tokens.
        dtype: "uint16" (as large as most vocabularies), "uint8", "uint32", "int32" or "int64".
        index: for every file one of int64 with the cumulative lengths of its documents, from 0 to
            the number of tokens.
        end: without an index, the token that every document ends with (it belongs to it); the files
            are searched for it once. Without both, each file is one document.
        shuffle: another order of the documents in every epoch.
        seed: of that order; the same on every rank.
        strategy: the Trainer's `ContextParallelStrategy`, which else says itself what a rank is to
            read when a Trainer takes the loader; or a `ContextParallel`.

    Raises:
        ConfigError: if a file does not hold what was said.
    """

    def __init__(
        self,
        files: Paths,
        packing: Packing | int,
        *,
        dtype: str = "uint16",
        index: Paths | None = None,
        end: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        strategy: Any = None,
    ) -> None:
        super().__init__(packing, strategy)
        known = None if index is None else _listed(index)
        self._files = TokenFiles(_listed(files), dtype=dtype, index=known, end=end)
        self._order = shuffle, seed

    def _signature(self) -> str:
        return f"{super()._signature()}, shuffle={self._order[0]}, seed={self._order[1]}"

    def _documents(self, epoch: int) -> Iterator[Document]:
        keys = order(len(self._files), *self._order, epoch)
        return (Document(key, length) for key, length in self._files.lengths(keys))

    def _row(self, row: Row) -> Any:
        """This rank's part of a row, or why it cannot be cut."""
        share = self._share()
        if share is None:
            return self._read(row, ((0, edges_of(row)[-1]),))
        try:
            return self._cut(row, share)
        except BatchError as error:
            return Uncut(str(error))

    def _cut(self, row: Row, share: Share) -> ShardedBatch:
        rules, rank, world = share.rules, share.rank, share.world
        if not row:
            whole = row_of((), self.packing.labels)
            return sharded(whole, cut(whole, rules, rank=rank, world=world), share)
        edges = edges_of(row)
        names = dummy(self.packing.labels)
        fields = Fields(dict.fromkeys(names, 1), edges[-1], 1)
        documents = known_documents(edges, rules)
        choice, layout = lay_out(fields, documents, rules, world)
        exchange = exchange_of(layout, fields, documents, rules)
        sequence = Tokens(
            layout=layout,
            length=fields.length,
            batch=1,
            documents=documents,
            as_transformers=rules.as_transformers and rules.documents == "auto",
        )
        made = {fields.name: sequence}
        batch = self._read(row, layout.spans[rank])
        name = choice if isinstance(choice, str) else choice.name
        return ShardedBatch(
            Cut(
                batch,
                {fields.name: fields},
                made,
                (),
                name,
                exchange=exchange,
            ),
            layout=name,
            rank=rank,
            world=world,
            code=zlib.crc32(f"{self._files.sizes} {row}".encode()),
            shapes=", ".join(f"{field} (1, {fields.length}) {torch.int64}" for field in names),
            plans={} if get_worker_info() is None else planned(made, share, exchange),
        )

    def _read(self, row: Row, spans: Spans) -> Columns:
        """The fields `[1, S]` of the tokens that a rank holds of a row, and of its dummies."""
        edges, style = edges_of(row), self.packing.labels
        found = [dummies(0, style)]
        for low, high in spans:
            at, real = low, min(high, edges[-1])
            while at < real:
                number = bisect_right(edges, at) - 1
                end = min(real, edges[number + 1])
                found.append(self._piece(row[number], at - edges[number], end - edges[number]))
                at = end
            found.append(dummies(high - at, style))
        return joined(found)

    def _piece(self, part: Part, low: int, high: int) -> Columns:
        """Fields of the tokens `low..high` of a document of a row."""
        start, stop = part.start + low, part.start + high
        ends = part.ends and stop == part.stop
        own = self._files.read(part.key, start, stop + (not ends))
        return columns(own[: stop - start], own, first=low, style=self.packing.labels)


def _listed(paths: Paths) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)
