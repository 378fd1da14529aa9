"""Lengths of documents: from a file of numbers, or the documents of a dataset."""

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.data.packing.files import TokenFiles
from lightning_cp.data.packing.sources import Source
from lightning_cp.errors import BatchError, ConfigError


class Wanted(NamedTuple):
    """The documents of a dataset that are one row.

    Attributes:
        dataset: a folder of files, a file of tokens, or `module:name`.
        tokens: of the row.
        token_dtype: how a file stores its tokens.
        end: the token that ends a document in a file of tokens; None where the file is one.
    """

    dataset: str
    tokens: int
    token_dtype: str
    end: int | None


def lengths_of(file: Path) -> tuple[int, ...]:
    """Lengths from a file: a JSON list of numbers, or numbers with spaces or commas between them.

    Raises:
        ConfigError: if there is no such file, or it holds anything else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--lengths {file} cannot be read: {error}; "
            f"choose a file with the number of tokens of every document"
        ) from error
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    lengths = tuple(int(part) for part in parts if part.isdecimal())
    if not sum(lengths) or len(lengths) != len(parts):
        raise ConfigError(
            f"--lengths {file} must hold numbers of tokens, one for every document of a row, with "
            f"spaces, commas or line ends between them"
        )
    return lengths


def first_row(wanted: Wanted) -> tuple[int, ...]:
    """Lengths of the first documents of a dataset, as many as a row has tokens, the last cut off.

    Raises:
        ConfigError: if there is no such dataset, or it has no tokens.
    """
    if wanted.tokens < 1:
        raise ConfigError(f"--tokens {wanted.tokens} must be at least 1")
    lengths: list[int] = []
    left = wanted.tokens
    for length in _documents(wanted):
        lengths.append(min(length, left))
        left -= lengths[-1]
        if not left:
            break
    if not sum(lengths):
        raise ConfigError(f"--dataset {wanted.dataset} has no tokens; choose another one")
    return tuple(lengths)


def _documents(wanted: Wanted) -> Iterator[int]:
    path = Path(wanted.dataset)
    if path.is_dir():
        return _texts(path)
    module, colon, name = wanted.dataset.partition(":")
    if path.is_file() or not (colon and name):
        files = TokenFiles([path], dtype=wanted.token_dtype, end=wanted.end)
        return (length for _, length in files.lengths(iter(range(len(files)))))
    return _found(wanted.dataset, module, name)


def _texts(folder: Path) -> Iterator[int]:
    """Bytes of every file, in the order of their names; hidden ones are left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    inside = (path.relative_to(folder).parts for path in files)
    kept: Iterable[Path] = (
        path
        for path, parts in zip(files, inside, strict=True)
        if not any(part.startswith(".") for part in parts)
    )
    return (path.stat().st_size for path in kept)


def _found(dataset: str, module: str, name: str) -> Iterator[int]:
    """Documents of an object, of a module that is looked for in this folder too."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(import_module(module), name)
        if callable(found) and not hasattr(found, "__getitem__"):
            found = found()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--dataset {dataset} cannot be had: {error}; choose a folder, a file of tokens, or "
            f"module:name of a dataset, or of what makes one without arguments"
        ) from error
    finally:
        sys.path.pop(0)
    source = Source(found, lengths=None, names=(), shuffle=False, seed=0)
    return _lengths(dataset, source)


def _lengths(dataset: str, source: Source) -> Iterator[int]:
    try:
        yield from (document.length for document in source.documents(0))
    except BatchError as error:
        raise ConfigError(f"--dataset {dataset} gives no documents: {error}") from error
