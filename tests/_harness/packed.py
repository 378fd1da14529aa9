"""Packed rows: random lengths of documents of several kinds, and what attention costs them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_cp.balance import Banded, Causal, Chunked, Loads, Prefixed, Problem, Work
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask

KINDS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "equal": lambda dice, count: [dice.randint(200, 20000)] * count,
    "two lengths": lambda dice, count: [
        dice.choice((dice.randint(50, 2000), 300, 40000)) for _ in range(count)
    ],
    "log-normal": lambda dice, count: [
        max(1, int(dice.lognormvariate(8, 1.5))) for _ in range(count)
    ],
    "one giant": lambda dice, count: [
        dice.randint(20000, 200000),
        *(dice.randint(1, 3000) for _ in range(count)),
    ],
    "power law": lambda dice, count: [
        min(300000, int(100 * dice.paretovariate(0.8))) for _ in range(count)
    ],
    "uniform": lambda dice, count: [dice.randint(1, 20000) for _ in range(count)],
    "many": lambda dice, count: [dice.randint(1, 600) for _ in range(20 * count)],
}
"""By the kind of a row, lengths from dice and a number of documents."""

MASKS: dict[str, tuple[Work, Mask]] = {
    "causal": (Causal(), Mask(1, 1)),
    "full": (Banded(None, None), Mask(1, 1, is_causal=False)),
    "causal window": (Banded(2, 0), Mask(1, 1, window=(2, None))),
    "window": (Banded(1, 3), Mask(1, 1, is_causal=False, window=(1, 3))),
    "ahead": (Banded(None, 1), Mask(1, 1, is_causal=False, window=(None, 1))),
    "self": (Banded(0, 0), Mask(1, 1, window=(0, 0))),
    "chunks": (Chunked(3, Causal()), Mask(1, 1, chunk=3)),
    "full chunks": (Chunked(4, Banded(None, None)), Mask(1, 1, is_causal=False, chunk=4)),
    "chunks, window": (Chunked(4, Banded(1, 0)), Mask(1, 1, window=(1, None), chunk=4)),
    "prefix": (Prefixed(5), Mask(1, 1, prefix=(5,))),
    "prefix, window": (Prefixed(6, 2, 1), Mask(1, 1, window=(2, 1), prefix=(6,))),
    "prefix, chunks": (Chunked(3, Prefixed(7)), Mask(1, 1, chunk=3, prefix=(7,))),
    "all": (Chunked(4, Prefixed(6, 1, 2)), Mask(1, 1, window=(1, 2), chunk=4, prefix=(6,))),
}
"""By name a work function, and a mask of what it counts."""


def random_row(number: int) -> tuple[int, tuple[int, ...]]:
    """Ranks (2 to 16) and lengths of a row; the kinds in turn."""
    dice = random.Random(number)
    kind = KINDS[list(KINDS)[number % len(KINDS)]]
    lengths = kind(dice, dice.randint(1, 60))
    dice.shuffle(lengths)
    return dice.randint(2, 16), tuple(lengths)


def problem(
    lengths: Sequence[int],
    world: int,
    *,
    work: Work | None = None,
    caps: tuple[float, float] = (1.03, 1.05),
    align: int = 1,
    min_piece: int = 1,
) -> Problem:
    """Equal ranks with caps."""
    shares = (1 / world,) * world
    return Problem(tuple(lengths), work or Causal(), shares, caps, align, min_piece)


def packed_mask(lengths: Sequence[int], like: Mask) -> Mask:
    """The mask of a row of documents in which a query sees what it would in another mask."""
    edges = (0, *accumulate(lengths))
    return replace(like, q_length=edges[-1], kv_length=edges[-1], documents=edges)


def counted(layout: Layout, mask: Mask) -> Loads:
    """Work, tokens, received and served keys, element by element; fragments are not."""
    ranks = range(layout.world)
    own = [set(layout.positions(rank).tolist()) for rank in ranks]
    seen = [{k for q in mine for k in range(layout.length) if mask.visible(q, k)} for mine in own]
    pairs = [sum(mask.visible(q, k) for q in mine for k in range(layout.length)) for mine in own]
    return Loads(
        tuple(pairs),
        tuple(map(len, own)),
        tuple(len(seen[rank] - own[rank]) for rank in ranks),
        tuple(sum(len(seen[peer] & own[rank]) for peer in ranks if peer != rank) for rank in ranks),
        (),
        (),
    )
