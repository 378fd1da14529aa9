"""Layouts by name, for rows of documents: what a batch is cut by."""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_cp.balance.options import Balanced
from lightning_cp.balance.planner import plan
from lightning_cp.balance.problem import Held, Piece, Problem
from lightning_cp.balance.work import Causal, Work
from lightning_cp.layout import LAYOUTS, Layout, per_document_zigzag
from lightning_cp.spans import Spans, union

DOCUMENT_LAYOUTS = ("balanced", "per_document_zigzag")
"""Names of the layouts that look at documents; those of `LAYOUTS` do not."""


PARTS = 64
"""Of a row for every rank, about: more parts that see nothing of each other are joined.

To a plan they are documents, of which no key travels; a plan of many takes longer to make.
"""


class Padding(NamedTuple):
    """How many dummy tokens a layout adds.

    Attributes:
        rows: least tokens of a rank.
        multiple: of this is the length of the layout.
    """

    rows: int = 0
    multiple: int = 1


NO_PADDING = Padding()
"""Layouts of the length of the row."""


def layout_of(
    choice: str | Balanced,
    lengths: Sequence[int],
    world: int,
    *,
    work: Work | None = None,
    padding: Padding = NO_PADDING,
) -> Layout:
    """The layout of a row; a pure function, so that every rank finds the same.

    Args:
        choice: a name of `LAYOUTS` or `DOCUMENT_LAYOUTS`, or `Balanced` with options.
        lengths: tokens of every document, in the order of the row.
        world: number of ranks.
        work: what the mask costs, causal attention where not given; only "balanced" asks.
        padding: dummy tokens, which lie behind the documents.

    Raises:
        ConfigError: if the options are for another number of ranks.
    """
    length = sum(lengths)
    if isinstance(choice, str) and choice in LAYOUTS:
        least = max(length, padding.rows * world)
        return LAYOUTS[choice](least + -least % padding.multiple, world)
    if choice == "per_document_zigzag":
        return padded(per_document_zigzag(lengths, world), padding)
    options = choice if isinstance(choice, Balanced) else Balanced()
    return padded(balanced(lengths, world, options, work or Causal()), padding)


def balanced(
    lengths: Sequence[int], world: int, options: Balanced | None = None, work: Work | None = None
) -> Layout:
    """Short documents whole on one rank, long ones on as few as even work and tokens allow.

    Args:
        lengths: tokens of every document, in the order of the row.
        world: number of ranks.
        options: caps and the like.
        work: what the mask costs, causal attention where not given.

    Returns:
        A layout whose ranks hold their tokens in the order of the row.

    Raises:
        ConfigError: if the options are for another number of ranks.
    """
    options, work = options or Balanced(), work or Causal()
    least = sum(lengths) // (PARTS * world)
    lengths = [part for length in lengths for part in work.parts(length, least)]
    problem = Problem(
        tuple(lengths),
        work,
        options.shares(world),
        (options.work_cap, options.token_cap),
        options.align,
        options.min_piece,
    )
    firsts = [0, *accumulate(lengths)]
    return Layout(
        firsts[-1],
        tuple(
            union((firsts[doc] + start, firsts[doc] + stop) for doc, start, stop in pieces)
            for pieces in plan(problem, options.cost())
        ),
    )


def pieces_of(layout: Layout, lengths: Sequence[int]) -> Held:
    """What every rank of a layout holds of every document; dummies are left out.

    Args:
        layout: any layout of the row.
        lengths: tokens of every document, in the order of the row.
    """
    documents = [
        (doc, start, stop)
        for doc, (start, stop) in enumerate(pairwise([0, *accumulate(lengths)]))
        if start < stop
    ]
    stops = [stop for _, _, stop in documents]
    held: Held = []
    for spans in layout.spans:
        own = []
        for low, high in spans:
            for doc, start, stop in documents[bisect_right(stops, low) :]:
                if start >= high:
                    break
                own.append(Piece(doc, max(low, start) - start, min(high, stop) - start))
        held.append(own)
    return held


def padded(layout: Layout, padding: Padding) -> Layout:
    """A layout with dummies behind its tokens: first where tokens lack, then where there are few.

    Args:
        layout: of the real tokens.
        padding: what every rank and the length must have.
    """
    sizes = list(layout.sizes)
    added = [max(0, padding.rows - size) for size in sizes]
    more = -(layout.length + sum(added)) % padding.multiple
    if not sum(added) + more:
        return layout
    fullness = [(sizes[rank] + added[rank], rank) for rank in range(layout.world)]
    heapify(fullness)
    for _ in range(more):
        size, rank = fullness[0]
        heapreplace(fullness, (size + 1, rank))
        added[rank] += 1
    return extended(layout, added)


def extended(layout: Layout, added: Sequence[int]) -> Layout:
    """A layout with dummies behind its tokens, `added[rank]` of them on every rank."""
    ends = [layout.length, *(layout.length + n for n in accumulate(added))]
    spans: list[Spans] = [
        union([*own, dummies]) for own, dummies in zip(layout.spans, pairwise(ends), strict=True)
    ]
    return Layout(layout.length + sum(added), tuple(spans))
