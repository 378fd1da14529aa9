"""One round of an exchange: its transfers and its tiles, in rows of buffers."""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_cp.mask import Band
from lightning_cp.spans import Span, Spans, total


class Tile(NamedTuple):
    """A block of scores: local query rows `q` against rows `k` of the round's key buffer.

    A causal tile is aligned at its bottom right corner: query row `i` of `n` sees the first
    `len(k) - n + i + 1` keys, and `len(k) >= n`. With `band=(low, high)` query row `i` sees key
    row `j` where `low <= j - i <= high`, both counted from the tile's own corner. Every query of
    a tile sees a key, and every key is seen. `row` is the batch row, or None for all rows.
    """

    q: Span
    k: Span
    causal: bool = False
    row: int | None = None
    band: Band | None = None

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs, for one batch row and one head."""
        q, k = self.q[1] - self.q[0], self.k[1] - self.k[0]
        if self.band is not None:
            return _up_to(q, k, self.band[1]) - _up_to(q, k, self.band[0] - 1)
        return q * k - q * (q - 1) // 2 if self.causal else q * k


def _up_to(q: int, k: int, distance: int) -> int:
    """How many pairs of `q` rows and `k` keys have `j - i <= distance`."""
    first = max(0, -distance)  # rows before it see nothing
    whole = min(max(first, k - 1 - distance), q)  # rows from here on see every key
    rows = max(0, whole - first)
    return rows * (first + distance + 1) + rows * (rows - 1) // 2 + max(0, q - whole) * k


def square(tile: Tile, rows: int) -> tuple[Tile, ...]:
    """A tile as blocks for kernels whose causal blocks are aligned at the top left.

    A causal tile becomes a full block left of a square causal one, a banded one blocks of at most
    `rows` queries.
    """
    if tile.band is not None:
        return _narrow(tile, rows)
    corner = tile.k[1] - (tile.q[1] - tile.q[0])
    if not tile.causal or corner == tile.k[0]:
        return (tile,)
    return (
        tile._replace(k=(tile.k[0], corner), causal=False),
        tile._replace(k=(corner, tile.k[1])),
    )


def _narrow(tile: Tile, rows: int) -> tuple[Tile, ...]:
    """A banded tile as blocks of at most `rows` queries with just the keys that these see."""
    assert tile.band is not None  # invariant: only banded tiles are narrowed
    (start, stop), (first, last) = tile.q, tile.k
    low, high = tile.band
    blocks = []
    for at in range(0, stop - start, rows):
        n = min(rows, stop - start - at)
        begin, end = max(0, at + low), min(last - first, at + n + high)
        band = (low + at - begin, high + at - begin)
        full = band[0] <= 1 - n and band[1] >= end - begin - 1
        blocks.append(
            Tile(
                (start + at, start + at + n),
                (first + begin, first + end),
                row=tile.row,
                band=None if full else band,
            )
        )
    return tuple(blocks)


class Transfer(NamedTuple):
    """Rows that travel to or from `peer` (a rank of the group) in one message, packed in order."""

    peer: int
    rows: Spans

    @property
    def size(self) -> int:
        """Number of rows."""
        return total(self.rows)


@dataclass(frozen=True, slots=True)
class Round:
    """One step of an exchange: a buffer of keys and values, and the tiles that read it.

    Attributes:
        size: rows of the buffer; round 0's buffer is the rank's own shard.
        relay: `sends` read the buffer of the round before instead of the own shard.
        sends: rows of the source that leave for the buffers of peers.
        receives: rows of this buffer that arrive.
        tiles: scores to compute on this buffer.
        returns: backward, rows of this buffer whose gradient goes to the peer that owns them.
        collects: backward, rows of the own shard whose gradient arrives from a peer.
        keys: global positions of the rows of the buffer, in order.
    """

    size: int
    relay: bool = False
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    tiles: tuple[Tile, ...] = ()
    returns: tuple[Transfer, ...] = ()
    collects: tuple[Transfer, ...] = ()
    keys: Spans = ()
