"""Zigzag within every document: even work, and every document on every rank."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_cp.layout.base import Layout
from lightning_cp.spans import Span, union


def per_document_zigzag(lengths: Sequence[int], world: int) -> Layout:
    """Chunks r and 2 * world - 1 - r of 2 * world nearly equal chunks of every document to rank r.

    The usual way to balance packed rows. Almost all keys of every document travel to every rank,
    and short documents fall into very short pieces; see `lightning_cp.balance` for another way.

    Args:
        lengths: tokens of every document, in the order of the row.
        world: number of ranks.
    """
    chunks = 2 * world
    held: list[list[Span]] = [[] for _ in range(world)]
    for start, stop in pairwise([0, *accumulate(lengths)]):
        edges = [start + (stop - start) * chunk // chunks for chunk in range(chunks + 1)]
        for rank, spans in enumerate(held):
            last = chunks - 1 - rank
            spans += [(edges[rank], edges[rank + 1]), (edges[last], edges[last + 1])]
    return Layout(sum(lengths), tuple(map(union, held)))
