"""Heads for tokens: neighbouring ranks swap parts of their tokens' heads and act as one rank.

A *block* is some neighbouring ranks of the group, its *members*. After the swap each member holds
all tokens of the block, in global order, for its share of the heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Layout
from lightning_cp.plan.heads import Heads, portions, shares
from lightning_cp.plan.memory import Sizes
from lightning_cp.spans import Spans, rows, total, union


class Row(NamedTuple):
    """Bytes of one row of some tensors, of one query head and of one key head."""

    q: int
    kv: int = 0

    def plus(self, other: "Row") -> "Row":
        """Bytes of both."""
        return Row(self.q + other.q, self.kv + other.kv)


class Rows(NamedTuple):
    """Bytes of a row of what is swapped.

    Attributes:
        inputs: queries, keys and values.
        results: output and LSE.
        saved: what a backward needs besides the inputs: output, its gradient, and LSE.
        grads: gradients of the inputs.
    """

    inputs: Row
    results: Row
    saved: Row
    grads: Row


@dataclass(frozen=True, slots=True)
class Switch:
    """How one rank swaps heads for tokens with the other members of its block.

    Attributes:
        index: place of this rank among the members.
        members: ranks within the context-parallel group, in order.
        q: for every member the rows of the block's queries that it holds, in its local order.
        kv: for every member the rows of the block's keys that it holds.
        replicated: every member gets all heads, and keeps the results of its own tokens.
    """

    index: int
    members: tuple[int, ...]
    q: tuple[Spans, ...]
    kv: tuple[Spans, ...]
    replicated: bool = False

    @property
    def q_size(self) -> int:
        """Queries of the block."""
        return sum(map(total, self.q))

    @property
    def kv_size(self) -> int:
        """Keys of the block."""
        return sum(map(total, self.kv))

    @property
    def others(self) -> tuple[int, ...]:
        """Places of the other members."""
        return tuple(place for place in range(len(self.members)) if place != self.index)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Places of the members that get results of this rank, and that it gets results of."""
        return () if self.replicated else self.others

    def rejects(self, heads: int, *, dropout: bool) -> str | None:
        """Why a call with so many query heads cannot be run, and the way out, or None."""
        if self.replicated and dropout:
            return (
                "every rank computes the whole call and would drop other weights of it; use "
                "another exchange, or attention without dropout"
            )
        size = len(self.members)
        if heads >= size or self.replicated:
            return None
        fits = max(n for n in range(1, heads + 1) if size % n == 0)
        smaller = f"Hybrid(ulysses_size={fits}) of lightning_cp.plan or " if fits > 1 else ""
        return (
            f"{size} ranks swap heads for tokens and each needs a query head, but the call has "
            f"{heads}; use exchange={smaller}'direct'"
        )

    def shares(self, heads: int, kv_heads: int) -> tuple[Heads, ...]:
        """The heads of every member."""
        if self.replicated:
            return shares(heads, kv_heads, 1) * len(self.members)
        return shares(heads, kv_heads, len(self.members))

    def shared(self, heads: int, kv_heads: int) -> bool:
        """Whether a key head has several readers, so that its gradient is a sum over members."""
        read = sum(share.counts[1] for share in self.shares(heads, kv_heads))
        return read > kv_heads and not self.replicated

    def keeps(self, heads: int, kv_heads: int) -> bool:
        """Whether a forward can keep for the backward what arrived in place of its inputs.

        Not where several members get the same heads: it would be more than the inputs.
        """
        return not (self.replicated or self.shared(heads, kv_heads))

    def portions(self, heads: int, kv_heads: int, most: int) -> tuple[tuple[Heads, ...], ...]:
        """The heads of every member in portions that travel one after the other.

        At most `most`, and as many for each member as the one with fewest key heads has.

        Returns:
            For every portion the heads of every member.
        """
        found = self.shares(heads, kv_heads)
        count = min(most, *(share.counts[1] for share in found))
        cut = (portions(share, heads // kv_heads, count) for share in found)
        return tuple(zip(*cut, strict=True))

    def rows(self, sizes: Sizes, *, half_grads: bool) -> Rows:
        """Bytes of a row of what is swapped in a call; see `wide_grads`."""
        query, item = sizes.batch * sizes.head_dim * sizes.itemsize, sizes.itemsize
        out, lse = sizes.batch * sizes.value_dim * item, sizes.batch * sizes.wire
        key = query + out
        wide = self.wide_grads(sizes.heads, sizes.kv_heads, half_grads=half_grads)
        grads = key // item * sizes.wire if wide else key
        return Rows(Row(query, key), Row(out + lse), Row(2 * out + lse), Row(query, grads))

    def wide_grads(self, heads: int, kv_heads: int, *, half_grads: bool) -> bool:
        """Whether gradients of keys and values travel in at least four bytes.

        Not where each is complete on its reader, or where that was asked for.
        """
        return self.shared(heads, kv_heads) and not half_grads

    def crossing(self, own: tuple[Heads, ...], row: Row) -> tuple[int, int]:
        """Bytes that leave and that arrive where heads are fetched."""
        here = self.index
        return (
            sum(self._bytes(here, own[other], row) for other in self.others),
            sum(self._bytes(other, own[here], row) for other in self.others),
        )

    def returning(self, own: tuple[Heads, ...], row: Row) -> tuple[int, int]:
        """Bytes that leave and that arrive on the way back."""
        arriving, leaving = self.crossing(own, row)
        return (0, 0) if self.replicated else (leaving, arriving)

    def whole(self, own: tuple[Heads, ...], row: Row) -> int:
        """Bytes of all tokens of the block, of the heads of this rank."""
        q, kv = own[self.index].counts
        return self.q_size * q * row.q + self.kv_size * kv * row.kv

    def _bytes(self, tokens: int, heads: Heads, row: Row) -> int:
        """Of the tokens of a member."""
        q, kv = heads.counts
        return total(self.q[tokens]) * q * row.q + total(self.kv[tokens]) * kv * row.kv


def blocks(layout: Layout, size: int) -> Layout:
    """The layout of blocks of `size` ranks, each with its tokens in global order."""
    held = layout.spans
    return Layout(
        layout.length,
        tuple(
            union(span for spans in held[first : first + size] for span in spans)
            for first in range(0, layout.world, size)
        ),
    )


def switch_of(
    q_layout: Layout, kv_layout: Layout, *, rank: int, size: int, replicated: bool = False
) -> Switch:
    """How `rank` swaps with the members of its block of `size` ranks."""
    block, index = divmod(rank, size)
    members = tuple(range(block * size, (block + 1) * size))

    def held(layout: Layout) -> tuple[Spans, ...]:
        buffer = blocks(layout, size).pieces(block)
        return tuple(rows(buffer, layout.spans[member]) for member in members)

    return Switch(index, members, held(q_layout), held(kv_layout), replicated)


def check_block(size: int, world: int) -> int:
    """The size of a block, if blocks of that size can be made.

    Raises:
        ConfigError: if it does not divide the number of ranks.
    """
    if world % size:
        fits = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"ulysses_size={size} does not divide the {world} ranks of the context-parallel "
            f"group; use one of {fits}"
        )
    return size
