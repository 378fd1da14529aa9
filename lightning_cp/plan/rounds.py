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
    """

    size: int
    relay: bool = False
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    tiles: tuple[Tile, ...] = ()
    returns: tuple[Transfer, ...] = ()
    collects: tuple[Transfer, ...] = ()
