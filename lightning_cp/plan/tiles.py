"""Cutting a mask with query and key pieces into tiles."""

from bisect import bisect_right
from collections.abc import Sequence

from lightning_cp.mask import Band, Rect
from lightning_cp.plan.rounds import Tile
from lightning_cp.spans import Piece, Span, Spans, overlapping, union


def cut(
    rects: Sequence[Rect], q_pieces: Sequence[Piece], k_pieces: Sequence[Piece], row: int | None
) -> tuple[Tile, ...]:
    """Tiles that cover every visible pair of the pieces exactly once, and nothing else.

    Args:
        rects: visible rectangles, sorted, with disjoint query spans.
        q_pieces: local queries, sorted by global position.
        k_pieces: rows of the key buffer, sorted by global position.
        row: batch row that the tiles are for.
    """
    found: list[Tile] = []
    for q_piece in q_pieces:
        for rect in _touching(rects, (q_piece.start, q_piece.stop)):
            q = _clip(q_piece, rect.q)
            for k in overlapping(k_pieces, rect.k):
                found.extend(_visible(rect, q, k, row))
    return _join(found)


def needed(rects: Sequence[Rect], q_pieces: Sequence[Piece]) -> Spans:
    """Global positions of every key that some query of the pieces sees."""
    keys: list[Span] = []
    for piece in q_pieces:
        for rect in _touching(rects, (piece.start, piece.stop)):
            q = _clip(piece, rect.q)
            start, stop = rect.k
            if rect.causal:
                stop = min(stop, q.stop)
            elif rect.band is not None:
                start, stop = max(start, q.start + rect.band[0]), min(stop, q.stop + rect.band[1])
            keys.append((start, stop))
    return union(keys)


def _touching(rects: Sequence[Rect], span: Span) -> Sequence[Rect]:
    """Rectangles whose queries overlap `span`; they are sorted and their queries disjoint."""
    first = bisect_right(rects, span[0], key=lambda rect: rect.q[1])
    last = bisect_right(rects, span[1] - 1, key=lambda rect: rect.q[0])
    return rects[first:last]


def _clip(piece: Piece, span: Span) -> Piece:
    low, high = max(piece.start, span[0]), min(piece.stop, span[1])
    return Piece(low, high, piece.row + low - piece.start)


def _tile(q: Piece, k: Piece, causal: bool, row: int | None) -> Tile:
    q_rows = (q.row, q.row + q.stop - q.start)
    k_rows = (k.row, k.row + k.stop - k.start)
    return Tile(q_rows, k_rows, causal and q.stop - q.start > 1, row)


def _visible(rect: Rect, q: Piece, k: Piece, row: int | None) -> list[Tile]:
    """The tiles of a query piece and a key piece that lie inside a rectangle."""
    if rect.causal:
        return _causal(q, k, row)
    if rect.band is not None:
        return _banded(q, k, rect.band, row)
    return [_tile(q, k, False, row)]


def _banded(q: Piece, k: Piece, band: Band, row: int | None) -> list[Tile]:
    """At most two tiles: a banded one, or where only later keys are hidden as of `_causal`."""
    low, high = band
    q = _clip(q, (k.start - high, k.stop - low))
    k = _clip(k, (q.start + low, q.stop + high))
    if q.start >= q.stop or k.start >= k.stop:
        return []
    n, m = q.stop - q.start, k.stop - k.start
    first, last = low - (k.start - q.start), high - (k.start - q.start)
    if first > 1 - n:
        return [_tile(q, k, False, row)._replace(band=(first, min(last, m - 1)))]
    if last >= m - 1:
        return [_tile(q, k, False, row)]
    edge = q.start + m - last  # queries from here on see every key
    tiles = [_tile(_clip(q, (q.start, edge)), k, True, row)]
    if edge < q.stop:
        tiles.append(_tile(_clip(q, (edge, q.stop)), k, False, row))
    return tiles


def _causal(q: Piece, k: Piece, row: int | None) -> list[Tile]:
    """At most two tiles: one aligned at its bottom right corner, one full."""
    q = _clip(q, (k.start, q.stop))
    k = _clip(k, (k.start, q.stop))
    if q.start >= q.stop or k.start >= k.stop:
        return []
    if k.stop <= q.start + 1:
        return [_tile(q, k, False, row)]
    diagonal = [_tile(_clip(q, (q.start, k.stop)), k, True, row)]
    if k.stop < q.stop:
        diagonal.append(_tile(_clip(q, (k.stop, q.stop)), k, False, row))
    return diagonal


def _join(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Fewer, larger tiles: neighbours in keys, then full ones in queries, then triangles."""
    banded = [tile for tile in tiles if tile.band is not None]
    by_keys: list[Tile] = []
    for tile in sorted((t for t in tiles if t.band is None), key=lambda t: (t.q, t.k)):
        last = by_keys[-1] if by_keys else None
        if last and last.q == tile.q and last.k[1] == tile.k[0] and not last.causal:
            by_keys[-1] = tile._replace(k=(last.k[0], tile.k[1]))
        else:
            by_keys.append(tile)
    by_queries: list[Tile] = []
    for tile in sorted(by_keys, key=lambda t: (t.causal, t.k, t.q)):
        last = by_queries[-1] if by_queries else None
        full = last is not None and not (last.causal or tile.causal)
        if last and full and last.k == tile.k and last.q[1] == tile.q[0]:
            by_queries[-1] = tile._replace(q=(last.q[0], tile.q[1]))
        else:
            by_queries.append(tile)
    joined: list[Tile] = []
    for tile in sorted(by_queries, key=lambda t: (t.q, t.k)):
        last = joined[-1] if joined else None
        if last and _continues(last, tile):
            joined[-1] = Tile((last.q[0], tile.q[1]), tile.k, True, tile.row)
        else:
            joined.append(tile)
    return (*joined, *banded)


def _continues(last: Tile, tile: Tile) -> bool:
    """Whether the triangle of `tile` continues that of `last`, as in a shard's own keys."""
    triangles = all(t.causal or t.q[1] - t.q[0] == 1 for t in (last, tile))
    neighbours = last.q[1] == tile.q[0] and last.k[0] == tile.k[0]
    return triangles and neighbours and tile.k[1] - last.k[1] == tile.q[1] - tile.q[0]
