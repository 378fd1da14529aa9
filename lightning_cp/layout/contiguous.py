"""Contiguous layout: rank r holds the r-th of `world` nearly equal runs."""

from itertools import pairwise

from lightning_cp.layout.base import Layout


def contiguous(length: int, world: int) -> Layout:
    """One run of positions per rank; sizes differ by at most one.

    Even in work for bidirectional attention; for causal attention the last rank does about twice
    the mean (use `zigzag`). Ranks beyond the length hold nothing.
    """
    edges = [(length * rank + world - 1) // world for rank in range(world + 1)]
    return Layout(
        length,
        tuple(((start, stop),) if start < stop else () for start, stop in pairwise(edges)),
    )
