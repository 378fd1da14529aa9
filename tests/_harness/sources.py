"""Datasets, samplers and loaders of all kinds that users bring."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from tests._harness.models import Case, Text


class Stream(IterableDataset[Any]):
    """The samples of a text, in order, from the first worker alone."""

    def __init__(self, case: Case, batches: bool = False) -> None:
        self._text, self._size = Text(case, case.samples), case.batch if batches else 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        rows = [self._text[i] for i in range(len(self._text))] if not info or not info.id else []
        if self._size == 0:
            yield from rows
            return
        for start in range(0, len(rows), self._size):
            yield default_collate(rows[start : start + self._size])


class Pairs(BatchSampler):
    """A batch sampler of the user's: the last of every batch first."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


class Own(DataLoader[Any]):
    """Changes batches after their collate function."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield {**batch, "input_ids": batch["input_ids"].clone()}


class List(tuple[Any, ...]):
    """Batches; Lightning takes plain lists and tuples for several loaders."""


class Broken(Text):
    """Cannot be read to its end on the second rank."""

    def __getitem__(self, index: int) -> Any:
        if index == 4 and torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        return super().__getitem__(index)
