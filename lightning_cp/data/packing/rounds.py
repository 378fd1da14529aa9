"""From documents to rows, one for every virtual device at a time: integers only."""

import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lightning_cp.data.packing.options import Packing
from lightning_cp.errors import BatchError, ContextParallelWarning


class Document(NamedTuple):
    """One document of a source.

    Attributes:
        key: what finds it again.
        length: number of tokens.
        data: what was read already, None where it is still to be read.
    """

    key: int
    length: int
    data: Any = None


class Part(NamedTuple):
    """Tokens `start..stop` of a document, which a row holds as a document of its own.

    Attributes:
        key: of the document.
        start: first token.
        stop: end.
        ends: whether the last token predicts nothing; else it predicts the token at `stop`.
        data: of the document.
    """

    key: int
    start: int
    stop: int
    ends: bool
    data: Any = None

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


Row = list[Part]


def rounds(
    documents: Iterable[Document], packing: Packing, devices: int = 1
) -> Iterator[list[Row]]:
    """Rows that are filled together, one for every device.

    Documents are taken in their order, each into that row of the round where it fits and which has
    the least attention work; what fits nowhere waits for the next round. The same documents give
    the same rows.

    In the last round rows that would be empty get a half of the longest document. A row is empty
    only where there are fewer tokens than rows.

    Args:
        documents: in the order of the epoch; those without tokens are skipped.
        packing: how.
        devices: rows of a round.

    Raises:
        BatchError: if a document is longer than a row and that is refused.
    """
    source = _parts(documents, packing)
    pending: list[Part] = []
    held: dict[int, deque[Part]] = {}
    ended = False
    while True:
        rows: list[Row] = [[] for _ in range(devices)]
        ended = ended or _refill(source, pending, held, packing, devices)
        _release(rows, held, packing.tokens)
        if ended:
            pending = [*itertools.chain.from_iterable(held.values()), *pending]
            held.clear()
        pending = _fill(rows, pending, packing.tokens)
        if not any(rows):
            return
        _spread(rows)
        yield rows


def _refill(
    source: Iterator[Part],
    pending: list[Part],
    held: dict[int, deque[Part]],
    packing: Packing,
    devices: int,
) -> bool:
    """Read until enough documents are looked at; whether the source has ended."""
    limit = packing.hold_longer_than or packing.tokens
    while len(pending) < packing.buffer * devices:
        if sum(len(queue) // devices for queue in held.values()) >= packing.buffer:
            return False
        part = next(source, None)
        if part is None:
            return True
        if part.size > limit:
            held.setdefault(_level(part.size), deque()).append(part)
        else:
            pending.append(part)
    return False


def _release(rows: list[Row], held: dict[int, deque[Part]], tokens: int) -> None:
    """Give every row a document of one level, of the longest that fit, while there are enough."""
    room = tokens
    for level in sorted(held, reverse=True):
        queue = held[level]
        while len(queue) >= len(rows):
            parts = sorted(itertools.islice(queue, len(rows)), key=lambda part: -part.size)
            if parts[0].size > room:
                break
            rows.sort(key=lambda row: sum(part.size for part in row))
            for row, part in zip(rows, parts, strict=True):
                row.append(part)
                queue.popleft()
            room = tokens - max(sum(part.size for part in row) for row in rows)


def _level(size: int) -> int:
    """Sizes of one level differ by a half or less, in integers: two levels from 2^n to 2^(n+1)."""
    bits = size.bit_length()
    return 2 * bits + ((size >> max(bits - 2, 0)) & 1)


def _fill(rows: list[Row], pending: list[Part], tokens: int) -> list[Part]:
    """Put documents into rows; returns those that fit into none."""
    room = [tokens - sum(part.size for part in row) for row in rows]
    work = [sum(part.size**2 for part in row) for row in rows]
    left = []
    for part in pending:
        fitting = [index for index, free in enumerate(room) if free >= part.size]
        if not fitting:
            left.append(part)
            continue
        index = min(fitting, key=lambda index: (work[index], index))
        rows[index].append(part)
        room[index] -= part.size
        work[index] += part.size**2
    return left


def _spread(rows: list[Row]) -> None:
    """Give every empty row a half of the longest document of the round."""
    for empty in (row for row in rows if not row):
        size, index, place = max(
            (part.size, -index, -place)
            for index, row in enumerate(rows)
            for place, part in enumerate(row)
        )
        if size < 2:
            return
        row, place = rows[-index], -place
        part = row[place]
        middle = part.start + (size + 1) // 2
        row[place] = part._replace(stop=middle, ends=False)
        empty.append(part._replace(start=middle))


def _parts(documents: Iterable[Document], packing: Packing) -> Iterator[Part]:
    warned = False
    for key, length, data in documents:
        if length > packing.tokens and packing.long == "refuse":
            raise BatchError(
                f"document {key} has {length} tokens, a row {packing.tokens}; use long='split' to "
                f"make several documents of it, long='truncate' to leave out what is too much, or "
                f"longer rows"
            )
        if length > packing.tokens and packing.long == "truncate" and not warned:
            warned = True
            warnings.warn(
                f"document {key} has {length} tokens, a row {packing.tokens}: the last "
                f"{length - packing.tokens} are left out, and so it is with other documents that "
                f"are too long (said once); long='split' keeps all tokens",
                ContextParallelWarning,
                stacklevel=2,
            )
        stop = min(length, packing.tokens) if packing.long == "truncate" else length
        for start in range(0, stop, packing.tokens):
            end = min(start + packing.tokens, stop)
            yield Part(key, start, end, end == stop, data)
