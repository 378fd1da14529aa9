"""The same part of everything: what closes a rank where nothing cheaper keeps the caps."""

from bisect import bisect_left
from collections.abc import Iterator

from lightning_cp.balance.pool import Pool
from lightning_cp.balance.problem import Piece, Rest


def mirrored(pool: Pool, part: float) -> Iterator[tuple[Piece, int]]:
    """Take a head and a tail of everything in the pool: a part of its tokens and of its work.

    What is left has the same ratio of work to tokens as before, so that the caps can be kept by
    going on like this.

    Args:
        pool: what is left; changed.
        part: between 0 and 1.

    Yields:
        Pieces with their work.
    """
    rests, pool.rests = pool.rests, []
    owed_tokens = owed_work = 0.0  # what rounding left over so far
    for rest in rests:
        owed_tokens += (rest.stop - rest.start) * part
        owed_work += rest.work * part
        tokens = min(int(owed_tokens), rest.stop - rest.start)
        low, high = _ends(pool, rest, tokens, owed_work)
        owed_tokens -= tokens
        for start, stop in ((rest.start, low), (high, rest.stop)):
            if start < stop:
                work = pool.pairs(rest, start, stop)
                owed_work -= work
                yield Piece(rest.doc, start, stop), work
        if low < high:
            pool.add(Rest(pool.pairs(rest, low, high), rest.doc, low, high))
    pool.index()


def _ends(pool: Pool, rest: Rest, tokens: int, most: float) -> tuple[int, int]:
    """Where a head ends and a tail begins that have so many tokens and at most that work."""
    start, stop = rest.start, rest.stop

    def light(head: int) -> bool:
        tail = stop - tokens + head
        return pool.pairs(rest, start, start + head) + pool.pairs(rest, tail, stop) <= most

    head = bisect_left(range(tokens), True, key=light)
    return start + head, stop - tokens + head
