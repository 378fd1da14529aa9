"""Datasets of packed rows: which rows a process makes, and where it goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_cp.data.collate import Share
from lightning_cp.data.packing.options import Packing
from lightning_cp.data.packing.rounds import Document, Row, rounds
from lightning_cp.data.packing.rows import row_of
from lightning_cp.data.packing.sources import Source
from lightning_cp.errors import ConfigError

Asked = Callable[[], Share | None]
"""Says how this rank cuts, None where rows stay whole."""


class Rows(IterableDataset[Any], ABC):
    """Packed rows, each a batch of its own; base of the datasets that make them.

    Every process finds all rows from the lengths of the documents, and makes those that are its
    own: those of its virtual device, of which a worker makes every `num_workers`-th. So a device
    has the same rows in the same order whatever the number of workers and of ranks in its group,
    all devices have equally many, and every document is read once in an epoch.

    The Trainer's `ContextParallelStrategy` says which device a rank belongs to, counts epochs, and
    goes on with the very next row when it resumes a run.

    Args:
        packing: how rows are filled, or only their most tokens.
        strategy: says which device this is; else it is the only one, until a Trainer has a
            `ContextParallelStrategy`.
    """

    def __init__(self, packing: Packing | int, strategy: Any = None) -> None:
        self.packing = packing if isinstance(packing, Packing) else Packing(packing)
        self.devices, self.device = 1, 0
        self._share: Asked = partial(_given, None)
        # Workers that persist see an epoch that is set in the main process.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._state: dict[str, Any] | None = None
        self._running = (0, 0, 0)
        if strategy is not None:
            self._place(strategy, None)

    def placed(self, strategy: Any, share: Asked | None = None) -> "Rows":
        """A copy for the rank that a strategy stands for; this one is left as it is.

        Args:
            strategy: with `data_parallel_size` and `data_parallel_rank`.
            share: asked how the rank cuts, where the dataset does that itself; else the strategy.
        """
        own = type(self).__new__(type(self))
        own.__dict__.update(self.__dict__)
        own._start = self._start.clone().share_memory_()
        own._place(strategy, share)
        return own

    def _place(self, strategy: Any, share: Asked | None) -> None:
        self.devices = getattr(strategy, "data_parallel_size", 1)
        self.device = getattr(strategy, "data_parallel_rank", 0)
        self._share = share or getattr(strategy, "share", None) or self._share

    def begin(self, epoch: int, rows: int = 0) -> None:
        """Let the next iterations, in all workers, be those of an epoch.

        Args:
            epoch: number of the epoch.
            rows: rows of this device that are left out at its beginning.
        """
        self._start[0], self._start[1] = epoch, rows

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterations be those of an epoch, from its beginning."""
        self.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration in this process is; stateful loaders ask their workers for it."""
        epoch, first, taken = self._running
        return {"epoch": epoch, "first": first, "taken": taken, "of": self._signature()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration in this process go on behind the rows of another one.

        Raises:
            ConfigError: if that had other rows.
        """
        if state["of"] != self._signature():
            raise ConfigError(
                f"the state is of rows made with {state['of']}, these are made with "
                f"{self._signature()}; use the same options and number of devices, or begin anew"
            )
        self._state = state

    def _signature(self) -> str:
        return f"{self.packing}, {self.devices} devices"

    def __iter__(self) -> Iterator[Any]:
        """The rows of this process."""
        epoch, first = self._start.tolist()
        taken, state, self._state = 0, self._state, None
        if state is not None:
            epoch, first, taken = state["epoch"], state["first"], state["taken"]
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._running = epoch, first, taken
        found = rounds(self._documents(epoch), self.packing, self.devices)
        own = islice(found, first + worker + taken * workers, None, workers)
        return self._made(row[self.device] for row in own)

    def _made(self, rows: Iterator[Row]) -> Iterator[Any]:
        epoch, first, taken = self._running
        for number, row in zip(count(taken + 1), rows, strict=False):
            made = self._row(row)
            self._running = epoch, first, number
            yield made

    @abstractmethod
    def _documents(self, epoch: int) -> Iterator[Document]:
        """All documents of an epoch, in order."""

    @abstractmethod
    def _row(self, row: Row) -> Any:
        """The batch that a row is."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has the answer of this moment on how to cut."""
        return {**self.__dict__, "_share": partial(_given, self._share())}


def _given(share: Share | None) -> Share | None:
    return share


class PackedDataset(Rows):
    """Rows of documents of any dataset, each a batch: `DataLoader(dataset, batch_size=None)`.

    A row is a dict of tensors `[1, S]`: `input_ids`, `labels` and `position_ids` that start at 0
    with every document, int64, and the fields that are named. It has the most tokens that whole
    documents leave; see `Packing`. Every token of the dataset is in one row of an epoch, unless
    `long="truncate"`, and every token but the last of a document predicts the next one.

    Ranks of one context-parallel group get the same rows, virtual devices others; see `Rows`. Do
    not split the dataset by ranks or workers.

    Args:
        documents: a dataset, list or iterable of documents: tokens as 1-D tensor, array, list or
            bytes, or a dict with `input_ids`, maybe `labels` (not shifted, -100 for tokens that
            are not to be predicted) and further per-token fields. Empty ones are skipped.
        packing: how rows are filled, or only their most tokens.
        lengths: tokens of every document of a map-style dataset. With them a process reads only
            the documents of its own rows, else all.
        fields: names of further per-token fields that rows are to have.
        shuffle: another order of a map-style dataset in every epoch (`set_epoch`).
        seed: of that order; the same on every rank.
        strategy: the Trainer's `ContextParallelStrategy`, which else says itself which device a
            rank belongs to when a Trainer takes the loader.

    Raises:
        ConfigError: if the options do not suit the dataset.
    """

    def __init__(
        self,
        documents: Any,
        packing: Packing | int,
        *,
        lengths: Sequence[int] | None = None,
        fields: Sequence[str] = (),
        shuffle: bool = False,
        seed: int = 0,
        strategy: Any = None,
    ) -> None:
        super().__init__(packing, strategy)
        self._source = Source(documents, lengths=lengths, names=fields, shuffle=shuffle, seed=seed)
        self._order = f"shuffle={shuffle}, seed={seed}"

    def _signature(self) -> str:
        return f"{super()._signature()}, {self._order}"

    def _documents(self, epoch: int) -> Iterator[Document]:
        return self._source.documents(epoch)

    def _row(self, row: Row) -> Any:
        parts = ((part, self._source.fields(part)) for part in row)
        return row_of(parts, self.packing.labels)
