"""Sequences of one batch told apart by how many tokens a rank holds of them.

[Note: told apart] A call of attention, a loss and an output say by their sizes alone which sequence
they are about. Sequences of different lengths may have the same share on some rank, and sequences
of the same length may differ in padding or documents. A dummy token or two more on such a rank
make every size unmistakable, on all ranks, and also that of labels which a step shifted itself and
which are one too few.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_cp.balance.layouts import extended
from lightning_cp.layout import Layout


class Sizes(NamedTuple):
    """What a call may see of a sequence.

    Attributes:
        shares: tokens of every rank.
        batch: number of rows.
    """

    shares: tuple[int, ...]
    batch: int


def told_apart(layout: Layout, batch: int, others: Sequence[Sizes], *, multiple: int) -> Layout:
    """The layout with as many dummies more as it takes; a pure function, the same on every rank.

    Args:
        layout: of a sequence.
        batch: its number of rows.
        others: the sequences that it must not be taken for.
        multiple: the length stays a multiple of this.

    Returns:
        A layout of which no rank holds as many tokens as of another sequence, of a row or of all
        rows.
    """
    added = [0] * layout.world
    sizes = layout.sizes

    def clashing(rank: int) -> bool:
        size = sizes[rank] + added[rank]
        return any(_alike(size, batch, other.shares[rank], other.batch) for other in others)

    while True:
        wrong = [rank for rank in range(layout.world) if clashing(rank)]
        if not wrong and (layout.length + sum(added)) % multiple == 0:
            return extended(layout, added) if any(added) else layout
        emptiest = min(range(layout.world), key=lambda rank: sizes[rank] + added[rank])
        for rank in wrong or [emptiest]:
            added[rank] += 1


def _alike(size: int, batch: int, share: int, rows: int) -> bool:
    """Whether tokens of one row, or of all rows, are as many, or would be with one fewer."""
    if abs(size - share) <= 1:
        return True
    return size * batch in (share * rows, (share - 1) * rows) or (size - 1) * batch == share * rows
