"""Zigzag layout: rank r holds the r-th run from the front and the r-th from the back."""

from lightning_cp.layout.base import Layout
from lightning_cp.spans import union


def zigzag(length: int, world: int) -> Layout:
    """Chunks r and 2 * world - 1 - r of 2 * world nearly equal chunks to rank r.

    Makes causal attention even: an early chunk sees few keys, its late partner sees many. Any
    length; chunk sizes differ by at most one, chunks may be empty, neighbouring chunks are one
    span (the last rank's always are).
    """
    chunks = 2 * world
    edges = [length * chunk // chunks for chunk in range(chunks + 1)]
    return Layout(
        length,
        tuple(
            union(
                [
                    (edges[rank], edges[rank + 1]),
                    (edges[chunks - 1 - rank], edges[chunks - rank]),
                ]
            )
            for rank in range(world)
        ),
    )
