"""Corpora to pack, and what an epoch of rows must hold of them."""

import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.data.collate import ShardedBatch, Share
from lightning_cp.data.cut import Rules
from lightning_cp.data.valid import IGNORED

MEGABYTES = 2

ODD = (5, 0, 1, 16, 17, 3, 0, 1, 33, 8, 8, 2, 16, 40, 1, 7)
"""Empty and 1-token documents, some of a row's 16 tokens, of one more, of several rows."""


class Device(NamedTuple):
    """What a strategy says of the place of a rank."""

    data_parallel_size: int
    data_parallel_rank: int


@cache
def corpus() -> tuple[bytes, ...]:
    """Files of the standard library, a few MB, with an empty and a 1-token document among them."""
    found, size = [b"", b"#"], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(file.read_bytes())
        size += len(found[-1])
        if size >= MEGABYTES << 20:
            break
    return tuple(found)


def numbered(lengths: Iterable[int]) -> list[Tensor]:
    """Documents of some lengths in which every token is another number, from 0."""
    found, at = [], 0
    for length in lengths:
        found.append(torch.arange(at, at + length))
        at += length
    return found


def write(folder: Path, documents: Sequence[Any], dtype: str = "uint32") -> dict[str, Any]:
    """Write a file of tokens and its index; the arguments of a `TokenDataset` over it."""
    tokens = [np.asarray(list(x) if isinstance(x, bytes) else x, dtype=dtype) for x in documents]
    files, index = folder / "tokens.bin", folder / "tokens.idx"
    np.concatenate(tokens).tofile(files)
    np.cumsum([0, *map(len, tokens)], dtype=np.int64).tofile(index)
    return {"files": files, "index": index, "dtype": dtype}


def share(rank: int, world: int, layout: str = "balanced") -> Share:
    """How a rank cuts, with documents kept apart."""
    return Share(Rules(layout=layout, documents="position_ids"), rank, world)


def whole_rows(parts: Sequence[Sequence[ShardedBatch]]) -> list[dict[str, Tensor]]:
    """Rows put together from the parts of all ranks of a group, by rank."""
    rows = []
    for shards in zip(*parts, strict=True):
        sequence = shards[0].part.sequence
        assert len({(x.code, x.shapes, x.part.sequence) for x in shards}) == 1
        rows.append(
            {
                name: sequence.layout.unshard([x.batch[name] for x in shards], dim=1)[
                    :, : sequence.length
                ]
                for name in shards[0].batch
            }
        )
    return rows


def loaded(data: Any, workers: int = 0) -> list[Any]:
    """The rows that a loader gives."""
    context = "fork" if workers else None
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    return list(loader)


def equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether rows are the same, field by field."""
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(found, expected, strict=True)
    )


def check_epoch(
    rows: Iterable[dict[str, Tensor]], lengths: Sequence[int], labels: str = "labels"
) -> None:
    """Every token of numbered documents exactly once, and every pair of neighbours as a target.

    Positions continue within a document and start at 0 wherever the row goes on elsewhere.
    """
    found = list(rows)
    tokens = torch.cat([row["input_ids"].flatten() for row in found])
    targets = torch.cat([row[labels].flatten() for row in found])
    total = sum(lengths)
    assert torch.equal(tokens.sort().values, torch.arange(total))
    expected = torch.arange(1, total + 1)
    ends = torch.tensor([length for length in lengths if length]).cumsum(0) - 1
    expected[ends] = IGNORED
    assert torch.equal(targets, expected[tokens])
    for row in found:
        ids, positions = row["input_ids"][0], row["position_ids"][0]
        assert positions[0] == 0
        moves = positions.diff()
        assert bool(((moves == 1) | (positions[1:] == 0)).all())
        assert bool((ids.diff()[moves == 1] == 1).all())
        assert not bool(torch.isin(ids[:-1][moves == 1], ends).any())


def pair_counts(tokens: Tensor, targets: Tensor) -> Tensor:
    """How often every token has every target, none included."""
    return torch.bincount(tokens.flatten() * 257 + (targets.flatten().clamp_min(-1) + 1))
