"""Token files: memory-mapped, read by spans, with the documents that they hold."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_cp.errors import ConfigError

DTYPES = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""How tokens may be stored."""

CHUNK = 2**20
"""Tokens, or documents, that are looked at at a time."""


class TokenFiles:
    """Documents in files that hold tokens and nothing else.

    Files are mapped into memory where they are read, never as a whole.

    Args:
        paths: the files, in order.
        dtype: name of how tokens are stored, in the byte order of this machine.
        index: for every file one of int64 with the cumulative lengths of its documents.
        end: without an index, the token that every document ends with; else a file is a document.

    Raises:
        ConfigError: if a file is none of tokens, or an index is not that of its file.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        dtype: str,
        index: Sequence[str | Path] | None = None,
        end: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if index is not None and (end is not None or len(index) != len(paths)):
            raise ConfigError(
                f"{len(index)} index files for {len(paths)} token files, and end={end}; give one "
                f"index for every file, or the token that ends a document"
            )
        self._paths, self._dtype = [Path(path) for path in paths], DTYPES[dtype]
        self.sizes = tuple(_size(path, self._dtype) for path in self._paths)
        self._maps: dict[int, Tensor] = {}
        edges = [self._edges(file, index, end) for file in range(len(self._paths))]
        self._firsts = [0, *accumulate(len(found) - 1 for found in edges)]
        self._starts = torch.cat([found[:-1] for found in edges])
        self._lengths = torch.cat([found.diff() for found in edges])

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._lengths)

    def lengths(self, keys: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Documents with their numbers of tokens, in a given order."""
        known = self._lengths
        for key in keys:
            yield key, int(known[key])

    def read(self, key: int, start: int, stop: int) -> Tensor:
        """Tokens `start..stop` of a document, int64; nothing else is read."""
        file, first = bisect_right(self._firsts, key) - 1, int(self._starts[key])
        return self._mapped(file)[first + start : first + stop].long()

    def _mapped(self, file: int) -> Tensor:
        if file not in self._maps:
            self._maps[file] = _map(self._paths[file], self._dtype)
        return self._maps[file]

    def _edges(self, file: int, index: Sequence[str | Path] | None, end: int | None) -> Tensor:
        size = self.sizes[file]
        if index is not None:
            edges = _map(Path(index[file]), torch.int64).clone()
            if (
                not len(edges)
                or edges[0] != 0
                or edges[-1] != size
                or bool((edges.diff() < 0).any())
            ):
                raise ConfigError(
                    f"{index[file]} is no index of {self._paths[file]}: it must hold int64 that "
                    f"rise from 0 to {size}, the tokens of the file (cumulative lengths)"
                )
            return edges
        found = [torch.tensor([0]), *(self._ends(file, end) if end is not None else ())]
        rising: Tensor = torch.cat([*found, torch.tensor([size])]).unique_consecutive()
        return rising

    def _ends(self, file: int, end: int) -> Iterator[Tensor]:
        """Where documents end, from the tokens themselves."""
        for start in range(0, self.sizes[file], CHUNK):
            chunk = self._mapped(file)[start : start + CHUNK].long()
            yield chunk.eq(end).nonzero().flatten() + start + 1

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process maps the files anew."""
        return {**self.__dict__, "_maps": {}}


def _size(path: Path, dtype: torch.dtype) -> int:
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}; pass the paths of raw files of tokens, and as index those "
            f"of their cumulative lengths"
        )
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size} bytes, no multiple of the {dtype.itemsize} of a {dtype}; pass the "
            f"dtype that it was written with"
        )
    return size // dtype.itemsize


def _map(path: Path, dtype: torch.dtype) -> Tensor:
    size = _size(path, dtype)
    if not size:
        return torch.empty(0, dtype=dtype)
    found: Tensor = torch.from_file(str(path), shared=False, size=size, dtype=dtype)
    return found
