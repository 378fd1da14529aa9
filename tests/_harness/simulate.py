"""All plans of one group run on token positions instead of tensors, and the answer they owe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_cp.layout import LAYOUTS, Layout
from lightning_cp.mask import Documents, Mask
from lightning_cp.plan import Plan, Tile, Transfer
from lightning_cp.spans import Span, Spans

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EMPTY = -1
"""A buffer row that nothing has arrived in."""


class Message(NamedTuple):
    """Rows that left `sender` for `receiver`: `out` of its source, `into` of the other's buffer."""

    sender: int
    receiver: int
    out: Ints
    into: Ints


class Pairs(NamedTuple):
    """Local query rows and buffer rows of one tile, element by element; batch row or None."""

    q: Ints
    k: Ints
    row: int | None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the forward of every rank saw.

    Attributes:
        plans: one per rank.
        queries: for every rank the positions of its local queries.
        buffers: for every round and rank the key positions that the tiles read.
        messages: for every round the messages that arrived.
    """

    plans: tuple[Plan, ...]
    queries: tuple[Ints, ...]
    buffers: tuple[tuple[Ints, ...], ...]
    messages: tuple[tuple[Message, ...], ...]

    def pairs(self, rank: int) -> Iterator[tuple[int | None, Ints, Ints]]:
        """Batch row, query positions and key positions of every tile of `rank`, pair by pair."""
        for step, buffers in enumerate(self.buffers):
            for q, k, row in _computed(self.plans[rank], step):
                yield row, self.queries[rank][q], buffers[rank][k]

    def scores(self, shape: tuple[int, int, int]) -> Ints:
        """How often all ranks together compute each pair: `[batch, queries, keys]`."""
        counts = np.zeros(shape, np.int64)
        for rank in range(len(self.plans)):
            for row, q, k in self.pairs(rank):
                _add_one(counts, row, q, k)
        return counts

    def gradients(self, batch: int) -> tuple[Ints, tuple[tuple[Message, ...], ...]]:
        """Send home a count per touched buffer row: `[batch, keys]`, and each round's messages."""
        home = [self._touched(rank, 0, batch) for rank in range(len(self.plans))]
        sent: list[tuple[Message, ...]] = []
        for step in range(1, len(self.buffers)):
            touched = [self._touched(rank, step, batch) for rank in range(len(self.plans))]
            rounds = [plan.rounds[step] for plan in self.plans]
            sent.append(matched([r.returns for r in rounds], [r.collects for r in rounds]))
            for sender, receiver, out, into in sent[-1]:
                assert _inside(out, touched[sender].shape[1])
                assert _inside(into, home[receiver].shape[1])
                home[receiver][:, into] += touched[sender][:, out]
                touched[sender][:, out] = 0
            for rank, left in enumerate(touched):
                assert not left.any(), f"round {step}: rank {rank} keeps a peer's gradient"
        counts = np.zeros((batch, sum(part.size for part in self.buffers[0])), np.int64)
        for part, positions in zip(home, self.buffers[0], strict=True):
            counts[:, positions] = part
        return counts, tuple(sent)

    def _touched(self, rank: int, step: int, batch: int) -> Ints:
        counts = np.zeros((batch, self.plans[rank].rounds[step].size), np.int64)
        for _, k, row in _computed(self.plans[rank], step):
            _add_one(counts, row, k)
        return counts


def simulate(plans: Sequence[Plan], q_layout: Layout, kv_layout: Layout) -> Simulation:
    """Move the key positions of all ranks through the rounds as messages would.

    Raises:
        AssertionError: if messages do not match in pairs, or a row of a buffer is filled not
            exactly once.
    """
    own = tuple(indices(spans) for spans in kv_layout.spans)
    buffers, messages = [own], []
    assert [plan.rank for plan in plans] == list(range(kv_layout.world)), "one plan per rank"
    assert len({len(plan.rounds) for plan in plans}) == 1, "the same rounds on every rank"
    for plan, positions in zip(plans, own, strict=True):
        local = plan.rounds[0]
        assert local.size == plan.kv_size == positions.size
        moved = local.sends, local.receives, local.returns, local.collects
        assert not any(moved), f"round 0 of rank {plan.rank} is local"
    for step in range(1, len(plans[0].rounds)):
        rounds = [plan.rounds[step] for plan in plans]
        filled = tuple(np.full(r.size, EMPTY) for r in rounds)
        arrived = matched([r.sends for r in rounds], [r.receives for r in rounds])
        for sender, receiver, out, into in arrived:
            source = (buffers[-1] if rounds[sender].relay else own)[sender]
            assert _inside(out, source.size), f"round {step}: {sender} sends rows it lacks"
            assert _inside(into, filled[receiver].size), f"round {step}: {receiver} overflows"
            assert (filled[receiver][into] == EMPTY).all(), f"round {step}: {receiver} refilled"
            filled[receiver][into] = source[out]
        for rank, buffer in enumerate(filled):
            assert (buffer != EMPTY).all(), f"round {step}: rank {rank} reads what never arrived"
        buffers.append(filled)
        messages.append(arrived)
    queries = tuple(indices(spans) for spans in q_layout.spans)
    return Simulation(tuple(plans), queries, tuple(buffers), tuple(messages))


def matched(
    sends: Sequence[Sequence[Transfer]], receives: Sequence[Sequence[Transfer]]
) -> tuple[Message, ...]:
    """Each send of one round with the receive it meets.

    Raises:
        AssertionError: if one has no partner, or their sizes differ.
    """
    posted = [(rank, t.peer, t) for rank, group in enumerate(sends) for t in group]
    awaited = {(t.peer, rank): t for rank, group in enumerate(receives) for t in group}
    links = sorted((sender, receiver) for sender, receiver, _ in posted)
    waits = sorted((t.peer, rank) for rank, group in enumerate(receives) for t in group)
    assert links == waits, f"sends {links} meet receives {waits}"
    assert len(set(links)) == len(links), f"one message per pair and round: {links}"
    found = []
    for sender, receiver, transfer in posted:
        out, into = indices(transfer.rows), indices(awaited[sender, receiver].rows)
        assert sender != receiver
        assert 0 < out.size == into.size, f"{sender} sends {out}, {receiver} awaits {into}"
        found.append(Message(sender, receiver, out, into))
    return tuple(found)


def indices(spans: Spans) -> Ints:
    """The integers of `spans`, in order."""
    return np.array([i for start, stop in spans for i in range(start, stop)], np.int64)


def tile_pairs(tile: Tile) -> Pairs:
    """Row pairs that `tile` computes; a causal one is aligned at its bottom right corner."""
    q, k = indices((tile.q,)), indices((tile.k,))
    assert min(q.size, k.size) > 0, f"{tile} is empty"
    assert not tile.causal or q.size <= k.size, f"{tile} has rows above the diagonal"
    seen = np.ones((q.size, k.size), np.bool_)
    if tile.causal:
        seen = np.tril(seen, k.size - q.size)
    if tile.band is not None:
        assert not tile.causal, f"{tile} is banded and causal"
        seen = np.triu(np.tril(seen, tile.band[1]), tile.band[0])
    assert seen.any(1).all(), f"{tile} has queries without a key"
    assert seen.any(0).all(), f"{tile} has keys without a query"
    i, j = np.nonzero(seen)
    return Pairs(q[i], k[j], tile.row)


def _computed(plan: Plan, step: int) -> Iterator[Pairs]:
    for tile in plan.rounds[step].tiles:
        pairs = tile_pairs(tile)
        assert _inside(pairs.q, plan.q_size), f"{tile} reads queries that are not there"
        assert _inside(pairs.k, plan.rounds[step].size), f"{tile} reads keys that are not there"
        yield pairs


def _add_one(counts: Ints, row: int | None, *at: Ints) -> None:
    for batch_row in counts if row is None else counts[row : row + 1]:
        np.add.at(batch_row, at, 1)


def _inside(rows: Ints, size: int) -> bool:
    return bool(((rows >= 0) & (rows < size)).all())


def dense(mask: Mask, shape: tuple[int, int, int]) -> Bools:
    """The mask as `[batch, queries, keys]`, dummies included; written without `Mask.visible`."""
    _, q_size, kv_size = shape
    q, k = np.arange(q_size)[:, None], np.arange(kv_size)[None, :]
    seen = (q < mask.q_length) & (k < mask.kv_length)
    before, after = mask.window or (None, None)
    if before is not None:
        seen &= k >= q - before
    if after is not None:
        seen &= k <= q + after
    found = np.stack([seen] * shape[0])
    for row in range(shape[0]):
        first = mask.keys[row][0] if mask.keys else 0
        prefix = ((mask.prefix or (0,)) * shape[0])[row]
        if mask.is_causal:
            found[row] &= (q >= k) | ((q < prefix) & (k < prefix))
        edges = mask.documents or ()
        own = edges[row] if edges and isinstance(edges[0], tuple) else edges
        ids = np.repeat(np.arange(len(own) - 1), np.diff(own)) if own else np.zeros(0, np.int64)
        found[row, : ids.size, : ids.size] &= ids[:, None] == ids[None, :]
        if mask.chunk is not None:
            starts = np.full(kv_size, first)
            starts[: ids.size] = np.maximum(first, np.asarray(own, dtype=np.int64)[ids])
            found[row] &= (q - starts) // mask.chunk == (k - starts) // mask.chunk
        if mask.keys:
            start, stop = mask.keys[row]
            found[row] &= (start <= k) & (k < stop)
    return found


def spans_within(length: int) -> st.SearchStrategy[Span]:
    """Spans inside `0..length`, empty ones included."""
    ends = st.tuples(st.integers(0, length), st.integers(0, length))
    return ends.map(lambda pair: (min(pair), max(pair)))


@st.composite
def masks(draw: st.DrawFn, *, max_length: int = 40, max_batch: int = 3) -> Mask:
    """Causal or full; documents of all rows or of each, or another number of keys; visible keys
    per batch row."""
    q_length = draw(st.integers(0, max_length))
    kind = draw(st.sampled_from(["plain", "documents", "documents per row", "cross"]))
    batch = draw(st.integers(1, max_batch))
    kv_length = draw(st.integers(0, max_length)) if kind == "cross" else q_length
    inner = st.lists(st.integers(0, q_length), max_size=6).map(sorted)
    edges = inner.map(lambda inside: (0, *inside, q_length))
    documents: Documents | None = None
    if kind == "documents":
        documents = draw(edges)
    elif kind == "documents per row":
        documents = tuple(draw(st.lists(edges, min_size=batch, max_size=batch)))
    rows = st.lists(spans_within(kv_length), min_size=batch, max_size=batch).map(tuple)
    side = st.none() | st.integers(0, max_length // 2)
    window = st.none() | st.tuples(side, side)
    is_causal = draw(st.booleans())
    prefixes = st.lists(st.integers(0, max_length), min_size=batch, max_size=batch).map(tuple)
    return Mask(
        q_length,
        kv_length,
        is_causal,
        documents,
        draw(st.none() | rows),
        draw(window),
        draw(st.none() | st.integers(1, max_length // 2)),
        draw(st.none() | prefixes) if is_causal else None,
    )


@st.composite
def irregular(draw: st.DrawFn, length: int, world: int) -> Layout:
    """Random spans dealt to ranks in random order; a rank may hold nothing."""
    inner = draw(st.sets(st.integers(1, length - 1), max_size=8)) if length > 1 else set()
    edges = sorted({0, length} | inner)
    spans = draw(st.permutations(list(pairwise(edges))))
    owners = [draw(st.integers(0, world - 1)) for _ in spans]
    return Layout(
        length,
        tuple(
            tuple(span for span, owner in zip(spans, owners, strict=True) if owner == rank)
            for rank in range(world)
        ),
    )


def layouts(length: int, world: int) -> st.SearchStrategy[Layout]:
    """Every named layout, and irregular ones."""
    named = [make(length, world) for make in LAYOUTS.values()]
    return st.sampled_from(named) | irregular(length, world)
