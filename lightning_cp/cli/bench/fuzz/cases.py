"""Random attention calls of a group: lengths, masks, terms of scores, layouts, exchanges."""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch

from lightning_cp.balance import DOCUMENT_LAYOUTS, Balanced, layout_of
from lightning_cp.layout import LAYOUTS, Layout
from lightning_cp.mask import Documents, Edges, Mask, MaskMod, Window
from lightning_cp.plan import SCHEDULES, Exchange, Hybrid
from lightning_cp.spans import Span

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


MASK_MODS: dict[str, MaskMod] = {
    "thirds": lambda b, h, q, k: (q + 2 * k) % 3 != 0,
    "heads": lambda b, h, q, k: (q + k + h) % 2 == 0,
    "rows": lambda b, h, q, k: ((q - k) % (b + 2) == 0) | (k % 5 == 0),
}
"""Functions that hide keys, by name."""

LEARNED = ("sinks", "slopes", "table")
"""What is learned by head, see `lightning_cp.kernels.scores.PerHead`."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the call does to its scores besides scaling them.

    Attributes:
        softcap: see `lightning_cp.attend`.
        learned: names of what is learned by head.
        reach: the greatest distance in a table.
        mask_mod: name of a function that hides keys.
    """

    softcap: float | None = None
    learned: tuple[str, ...] = ()
    reach: int = 0
    mask_mod: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the terms that there are."""
        given = {"softcap": self.softcap, "mask_mod": self.mask_mod}
        return [*(name for name, x in given.items() if x is not None), *self.learned]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call of a group of ranks, forward and backward.

    Attributes:
        number: which of the cases of a seed.
        mask: who sees whom.
        terms: of the scores.
        layouts: who holds which queries, and which keys; positions past the mask are dummies.
        schedule: the exchange with its options.
        kernel: name of the kernel.
        dtype: name of the dtype.
        heads: query heads and key heads.
        dims: size of a key and of a value.
        batch: rows.
        keeps: what arrives in place of heads is kept for the backward.
    """

    number: int
    mask: Mask
    terms: Terms
    layouts: tuple[Layout, Layout]
    schedule: Exchange
    kernel: str
    dtype: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    keeps: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layouts[0].world

    @property
    def exchange(self) -> str:
        """Name of the exchange."""
        return self.schedule.name


def draw(number: int, *, seed: int, most_tokens: int, most_ranks: int) -> Case:
    """The case of a number, always the same for a seed.

    Args:
        number: which case.
        seed: of all cases.
        most_tokens: greatest length.
        most_ranks: greatest number of ranks.
    """
    dice = random.Random(f"{seed}/{number}")
    world, batch = dice.randint(1, most_ranks), dice.choice((1, 1, 2, 3))
    length = dice.choice((1, 2, 3, dice.randint(1, most_tokens), dice.randint(1, most_tokens)))
    crossed = dice.random() < 0.15
    kv_length = dice.randint(1, most_tokens) if crossed else length
    is_causal = dice.random() < 0.6
    mask = Mask(
        length,
        kv_length,
        is_causal,
        None if crossed else _documents(dice, length, batch),
        _keys(dice, kv_length, batch),
        _window(dice, length),
        dice.choice((None, None, None, dice.randint(1, length))),
        _prefix(dice, length, batch) if is_causal else None,
    )
    edges = mask.edges(mask.rows[0])
    q_layout = _layout(dice, (*edges[:-1], length + dice.choice((0, 0, 3))), world)
    kernel = dice.choice(("sdpa", "sdpa", "reference"))
    head_dim, kv_heads = dice.choice((3, 4, 8, 16)), dice.choice((1, 2, 3, 4))
    schedule = _schedule(dice, world)
    fewest = -(-schedule.block(world) // kv_heads)
    terms = _terms(dice)
    return Case(
        number=number,
        mask=mask,
        terms=terms,
        layouts=(
            q_layout,
            _layout(dice, (0, kv_length + dice.choice((0, 3))), world) if crossed else q_layout,
        ),
        schedule=schedule,
        kernel="reference" if set(terms.names) - {"sinks"} else kernel,
        dtype=dice.choice(("fp64", "fp64", "fp32", "bf16", "fp16")),
        heads=(kv_heads * max(fewest, dice.choice((1, 1, 2, 3, 4))), kv_heads),
        dims=(head_dim, dice.choice((head_dim, head_dim, 5))),
        batch=batch,
        keeps=dice.random() < 0.7,
    )


def _schedule(dice: random.Random, world: int) -> Exchange:
    name, chunks = dice.choice(sorted(SCHEDULES)), dice.randint(1, 4)
    if name != Hybrid.name:
        return SCHEDULES[name](head_chunks=chunks)
    size = dice.choice([n for n in range(1, world + 1) if world % n == 0])
    return Hybrid(size, dice.choice(("direct", "ring")), head_chunks=chunks)


def _edges(dice: random.Random, length: int) -> tuple[int, ...]:
    inner = sorted(dice.randint(0, length) for _ in range(dice.randint(0, 6)))
    return (0, *inner, length)


def _documents(dice: random.Random, length: int, batch: int) -> Documents | None:
    kind = dice.choice(("none", "shared", "shared", "per row"))
    if kind == "none":
        return None
    if kind == "shared":
        return _edges(dice, length)
    return tuple(_edges(dice, length) for _ in range(batch))


def _keys(dice: random.Random, length: int, batch: int) -> tuple[Span, ...] | None:
    if dice.random() < 0.6:
        return None
    ends = [sorted((dice.randint(0, length), dice.randint(0, length))) for _ in range(batch)]
    return tuple((start, stop) for start, stop in ends)


def _window(dice: random.Random, length: int) -> Window | None:
    if dice.random() < 0.6:
        return None
    sides = [dice.choice((None, 0, 1, dice.randint(0, length))) for _ in range(2)]
    return sides[0], sides[1]


def _prefix(dice: random.Random, length: int, batch: int) -> tuple[int, ...] | None:
    """None, or one for all rows or for each."""
    rows = dice.choice((0, 0, 0, 1, batch))
    return tuple(dice.randint(0, length) for _ in range(rows)) or None


def _terms(dice: random.Random) -> Terms:
    if dice.random() < 0.6:
        return Terms()
    return Terms(
        softcap=dice.choice((None, None, 1.5, 20.0)),
        learned=tuple(name for name in LEARNED if dice.random() < 0.4),
        reach=dice.choice((0, 1, 5, 80)),
        mask_mod=dice.choice((None, None, *sorted(MASK_MODS))),
    )


def _layout(dice: random.Random, edges: Edges, world: int) -> Layout:
    """A named layout of a row of documents, or random spans dealt to random ranks."""
    kind = dice.choice((*sorted(LAYOUTS), *DOCUMENT_LAYOUTS, "exact", "dealt"))
    length = edges[-1]
    if kind != "dealt":
        choice = Balanced(min_piece=1, align=1) if kind == "exact" else kind
        return layout_of(choice, [stop - start for start, stop in pairwise(edges)], world)
    cuts = sorted({0, length} | {dice.randint(0, length) for _ in range(8)})
    spans = list(pairwise(cuts))
    dice.shuffle(spans)
    held: list[list[Span]] = [[] for _ in range(world)]
    for span in spans:
        dice.choice(held).append(span)
    return Layout(length, tuple(map(tuple, held)))
