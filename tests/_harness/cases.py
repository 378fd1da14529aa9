"""Which calls the numerical tests make: a list that covers every pair of choices, with ids.

Every exchange meets every layout, mask and number of ranks; the other choices are dealt out so
that each value of one axis meets each value of every other at least once.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.context import CallLog, Context
from lightning_cp.layout import LAYOUTS, Layout
from lightning_cp.mask import Mask, Window
from lightning_cp.plan import SCHEDULES
from lightning_cp.sequences import Sequence
from lightning_cp.spans import Span
from tests._harness.asked import ASKED, Asked

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def uneven(length: int, world: int) -> Layout:
    """Runs of very different sizes in reverse order of ranks; the first rank holds nothing."""
    if world == 1:
        return LAYOUTS["contiguous"](length, 1)
    edges = [length - (length * rank * rank) // (world - 1) ** 2 for rank in range(world)]
    held = [((stop, start),) if stop < start else () for start, stop in pairwise(edges)]
    return Layout(length, ((), *held))


def dealt(length: int, world: int) -> Layout:
    """Tokens dealt out one by one from the last to the first: the local order is falling."""
    return Layout(
        length,
        tuple(tuple((i, i + 1) for i in range(length - 1 - r, -1, -world)) for r in range(world)),
    )


LAYOUT_MAKERS: Mapping[str, Callable[[int, int], Layout]] = {
    **LAYOUTS,
    "uneven": uneven,
    "dealt": dealt,
}


class Shown(NamedTuple):
    """What a mask has besides lengths: the call's, and those of the batch."""

    is_causal: bool = True
    documents: tuple[int, ...] | None = None
    keys: tuple[Span, ...] | None = None
    window: Window | None = None
    chunk: int | None = None
    prefix: tuple[int, ...] | None = None


def _cumulative(lengths: list[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))


def _documents(*eighths: int) -> Callable[[int, int], tuple[int, ...]]:
    """Documents of so many eighths of the length; the last takes what is left."""
    marks = _cumulative(list(eighths))[:-1]
    return lambda length, batch: (*(length * mark // 8 for mark in marks), length)


def _single_tokens(length: int, batch: int) -> tuple[int, ...]:
    """Documents of one token each, around a longer one in the middle."""
    edges = range(length + 1)
    return tuple(edge for edge in edges if not length // 3 < edge < 2 * length // 3)


def _right(length: int, batch: int) -> tuple[Span, ...]:
    """Padding on the right, more in every row; the last row of several has a token at most."""
    return tuple((0, max(length - 1 - row * length, min(length, 1))) for row in range(batch))


def _left(length: int, batch: int) -> tuple[Span, ...]:
    """Padding on the left, more in every row."""
    return tuple(((row + 1) * length // (batch + 2), length) for row in range(batch))


def _hidden(length: int, batch: int) -> tuple[Span, ...]:
    """Padding on both sides; the first row is nothing but padding."""
    return ((0, 0), *(((length + 3) // 4, length - length // 4) for _ in range(1, batch)))


MASKS: Mapping[str, Callable[[int, int], Shown]] = {
    "causal": lambda s, b: Shown(),
    "full": lambda s, b: Shown(False),
    "docs8": lambda s, b: Shown(documents=_documents(8)(s, b)),
    "docs44": lambda s, b: Shown(documents=_documents(4, 4)(s, b)),
    "docs35full": lambda s, b: Shown(False, documents=_documents(3, 5)(s, b)),
    "docs125": lambda s, b: Shown(documents=_documents(1, 2, 5)(s, b)),
    "docs0404": lambda s, b: Shown(documents=_documents(0, 4, 0, 4)(s, b)),
    "docs1token": lambda s, b: Shown(documents=_single_tokens(s, b)),
    "right": lambda s, b: Shown(keys=_right(s, b)),
    "rightfull": lambda s, b: Shown(False, keys=_right(s, b)),
    "left": lambda s, b: Shown(keys=_left(s, b)),
    "hidden": lambda s, b: Shown(False, keys=_hidden(s, b)),
    "docs35left": lambda s, b: Shown(documents=_documents(3, 5)(s, b), keys=_left(s, b)),
    "window": lambda s, b: Shown(window=(s // 3, None)),
    "windowself": lambda s, b: Shown(window=(0, 0)),
    "windowfull": lambda s, b: Shown(False, window=(s // 5, s // 4)),
    "windowahead": lambda s, b: Shown(False, window=(None, 2)),
    "docs35window": lambda s, b: Shown(documents=_documents(3, 5)(s, b), window=(s // 4, None)),
    "leftwindow": lambda s, b: Shown(False, keys=_left(s, b), window=(2, 1)),
    "hiddenwindow": lambda s, b: Shown(keys=_hidden(s, b), window=(s // 6, 0)),
    "chunk": lambda s, b: Shown(chunk=s // 3 + 1),
    "leftchunkfull": lambda s, b: Shown(False, keys=_left(s, b), chunk=s // 4 + 1),
    "docs35prefix": lambda s, b: Shown(documents=_documents(3, 5)(s, b), prefix=(s // 2,)),
    "prefixwindow": lambda s, b: Shown(
        window=(s // 3, s // 6), prefix=tuple((row + 1) * s // 3 for row in range(b))
    ),
}
"""From length and rows of a batch to what its tokens see."""


@dataclass(frozen=True)
class Cell:
    """One attention call of a group, forward and backward."""

    world: int
    exchange: str
    layout: str
    mask: str
    length: int
    batch: int
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    kernel: str
    dummies: int
    strides: str
    terms: str = "plain"

    def __str__(self) -> str:
        """The id of the test."""
        heads = "/".join(map(str, self.heads))
        return (
            f"W{self.world}-{self.exchange}-{self.layout}-{self.mask}-S{self.length}"
            f"+{self.dummies}-B{self.batch}-H{heads}-D{self.head_dim}-{self.dtype}-{self.kernel}"
            f"-{self.strides}{'' if self.terms == 'plain' else '-' + self.terms}"
        )

    @property
    def sequence(self) -> Sequence:
        """The sequence with its layout, documents and padding."""
        shown = self.shown
        layout = LAYOUT_MAKERS[self.layout](self.length + self.dummies, self.world)
        return Sequence(
            layout=layout,
            length=self.length,
            batch=self.batch,
            documents=shown.documents,
            keys=shown.keys,
        )

    @property
    def is_causal(self) -> bool:
        """Whether keys after the query are hidden."""
        return self.shown.is_causal

    @property
    def scale(self) -> float:
        """Factor on the scores; not the default one for an odd number of rows."""
        return float(self.head_dim**-0.5 if self.batch % 2 == 0 else 0.3)

    @property
    def shown(self) -> Shown:
        """What its tokens see."""
        return MASKS[self.mask](self.length, self.batch)

    @property
    def asked(self) -> Asked:
        """What its scores are made of."""
        return ASKED[self.terms](self.heads[0])

    @property
    def options(self) -> tuple[Any, ...]:
        """What the operator gets besides tensors."""
        shown = self.shown
        before, after = (-1 if side is None else side for side in shown.window or (None, None))
        limits = shown.is_causal, self.scale, before, after, shown.chunk or 0, shown.prefix
        return *limits, *self.asked.options()

    def mask_of(self) -> Mask:
        """What the whole sequence sees."""
        return Mask(self.length, self.length, *self.shown)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole q, k, v and the gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(self.length * 1000 + self.head_dim)
        size = self.length + self.dummies
        shapes = [(self.batch, h, size, self.head_dim) for h in (*self.heads, self.heads[1])]
        q, k, v, grad = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[self.dtype])
            for shape in (*shapes, shapes[0])
        )
        if self.strides == "expanded":
            grad = grad[:, :, :1, :1].expand(shapes[0])
        return q, k, v, grad

    def context(self, rank: int, group: Any) -> Context:
        """The context of the call on `rank`."""
        return Context(
            rank=rank,
            world=self.world,
            group=group,
            meta=None,
            sequences={"sequence": self.sequence},
            exchange=self.exchange,
            kernel="auto" if self.terms not in ("plain", "sinks") else self.kernel,
            log=CallLog(),
        )


AXES: Mapping[str, tuple[Any, ...]] = {
    "world": (1, 2, 2, 3, 3, 4, 4),  # by weight
    "exchange": tuple(SCHEDULES),
    "layout": tuple(LAYOUT_MAKERS),
    "mask": tuple(MASKS),
    "length": (1, 2, 7, 8, 10, 12, 16, 37, 64),
    "batch": (1, 2),
    "heads": ((4, 4), (4, 2), (4, 1), (6, 3)),
    "head_dim": (4, 8, 3),
    "dtype": ("fp64", "fp64", "fp32", "fp32", "bf16", "bf16", "fp16"),  # by weight
    "kernel": ("sdpa", "reference"),
    "dummies": (0, 5),
    "strides": ("contiguous", "transposed", "expanded"),
    "terms": ("plain", "plain", "plain", *ASKED),  # by weight
}

TRIPLES = ("exchange", "layout", "mask")
"""Axes of which every combination is in the list."""

DEFAULT, EVERYTHING = 560, 2100
"""How many cells the default run has, and how many there are."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(values: Mapping[str, Any]) -> Iterator[Pair]:
    """Every pair of choices that one cell makes."""
    return combinations([(name, values[name]) for name in AXES], 2)


def all_pairs() -> set[Pair]:
    """Every pair of choices there is."""
    choices = [[(name, value) for value in values] for name, values in AXES.items()]
    return {pair for x, y in combinations(choices, 2) for pair in product(x, y)}


def triples() -> set[tuple[Any, ...]]:
    """Every combination of `TRIPLES`."""
    return set(product(*(AXES[name] for name in TRIPLES)))


def _cells() -> tuple[Cell, ...]:
    """Every triple, then more by chance: each is that of some throws which makes most new pairs.

    In the first `DEFAULT` cells every triple and every pair of choices occurs.
    """
    dice = random.Random(0)
    missing, chosen = all_pairs(), dict.fromkeys(SPECIAL)
    bases = sorted(triples(), key=str)
    dice.shuffle(bases)
    for cell in chosen:
        missing.difference_update(pairs_of(vars(cell)))
    while len(chosen) < EVERYTHING:
        base = dict(zip(TRIPLES, bases[len(chosen) % len(bases)], strict=True))
        if len(chosen) >= DEFAULT - SPARE and missing:
            base = dict(next(iter(sorted(missing, key=str))))
        throws = [
            {name: dice.choice(values) for name, values in AXES.items()} | base for _ in range(12)
        ]
        best = max(throws, key=lambda values: sum(pair in missing for pair in pairs_of(values)))
        missing.difference_update(pairs_of(best))
        chosen.setdefault(Cell(**best))
    return tuple(chosen)


SPARE = 40
"""The last of the default cells, each made for a pair that is still missing."""

SPECIAL = (
    # As many heads as local tokens.
    Cell(2, "ring", "zigzag", "causal", 8, 1, (4, 2), 4, "fp64", "sdpa", 0, "contiguous"),
    # Fewer tokens than ranks, in the strictest dtype.
    Cell(3, "ring", "zigzag", "full", 1, 2, (4, 2), 4, "fp64", "sdpa", 0, "contiguous"),
    Cell(4, "allgather", "contiguous", "full", 2, 2, (4, 1), 4, "fp64", "sdpa", 0, "transposed"),
    Cell(4, "ring", "contiguous", "causal", 2, 1, (4, 4), 8, "fp64", "reference", 0, "expanded"),
    # Key heads that ranks share, which serve different numbers of query heads.
    Cell(4, "ulysses", "uneven", "causal", 37, 2, (6, 3), 4, "fp64", "sdpa", 5, "transposed"),
    Cell(3, "ulysses", "dealt", "docs125", 16, 1, (4, 1), 4, "bf16", "sdpa", 0, "expanded"),
    Cell(4, "hybrid", "zigzag", "hidden", 10, 2, (4, 1), 8, "fp32", "sdpa", 0, "contiguous"),
)

CELLS = _cells()
