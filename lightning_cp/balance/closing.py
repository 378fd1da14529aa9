"""The same part of everything: what closes a rank where nothing cheaper keeps the caps."""

from bisect import bisect_left
from collections.abc import Iterator

from lightning_cp.balance.pool import Pool
from lightning_cp.balance.problem import Piece, Rest


def mirrored(
    pool: Pool, part: float, *, small: tuple[float, float], align: int
) -> Iterator[tuple[Piece, int]]:
    """Take a part of the work and of the tokens of everything in the pool.

    Of n small documents so many whole ones, of each of the others a head and a tail. What is left
    has the same ratio of work to tokens as before, so that the caps can be kept by going on like
    this.

    Args:
        pool: what is left; changed.
        part: between 0 and 1.
        small: work and tokens up to which a document is not cut.
        align: cuts lie on multiples of this.

    Yields:
        Pieces with their work.
    """
    rests, pool.rests = pool.rests, []
    owed_tokens = owed_work = 0.0  # what rounding left over so far
    for rest in rests:
        size = rest.stop - rest.start
        owed_tokens += size * part
        owed_work += rest.work * part
        if rest.work <= small[0] and size <= small[1]:
            whole = owed_work / rest.work + owed_tokens / size >= 1
            low, high = (rest.stop, rest.stop) if whole else (rest.start, rest.stop)
        else:
            tokens = min(max(int(owed_tokens), 0), size)
            low, high = _rounded(*_ends(pool, rest, tokens, owed_work), rest, align)
        for start, stop in ((rest.start, low), (high, rest.stop)):
            if start < stop:
                work = pool.pairs(rest, start, stop)
                owed_work -= work
                owed_tokens -= stop - start
                yield Piece(rest.doc, start, stop), work
        if low < high:
            pool.add(Rest(pool.pairs(rest, low, high), rest.doc, low, high))
    pool.index()


def _rounded(low: int, high: int, rest: Rest, align: int) -> tuple[int, int]:
    """The nearest multiples of `align`, or the ends of the rest."""
    low, high = (round(end / align) * align for end in (low, high))
    low = min(max(low, rest.start), rest.stop)
    return low, min(max(high, low), rest.stop)


def _ends(pool: Pool, rest: Rest, tokens: int, most: float) -> tuple[int, int]:
    """Where a head ends and a tail begins that have so many tokens and at most that work.

    Of the two the one that costs more is as long as that allows.
    """
    start, stop = rest.start, rest.stop

    def work(head: int) -> int:
        tail = stop - tokens + head
        return pool.pairs(rest, start, start + head) + pool.pairs(rest, tail, stop)

    if work(0) >= work(tokens):
        head = bisect_left(range(tokens), True, key=lambda head: work(head) <= most)
    else:
        head = tokens - bisect_left(
            range(tokens), True, key=lambda tail: work(tokens - tail) <= most
        )
    return start + head, stop - tokens + head
