"""Plans of whole groups, simulated on positions, against the dense mask."""

import random
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS, Layout, contiguous, zigzag
from lightning_cp.mask import Mask, rows_of
from lightning_cp.plan import SCHEDULES, Plan, Round, Tile, Transfer, build_plan
from tests._harness.simulate import Bools, Message, Simulation, dense, layouts, masks, simulate

EXCHANGES = sorted(SCHEDULES)
quick = settings(deadline=None, max_examples=60)


class Case(NamedTuple):
    """One attention call of a whole group."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries and keys, dummies included."""
        rows = len(self.mask.keys or rows_of(self.mask.documents) or (None, None))
        return rows, self.q_layout.length, self.kv_layout.length

    def dense(self) -> Bools:
        return dense(self.mask, self.shape)

    def plans(self, exchange: str) -> list[Plan]:
        return [
            build_plan(self.q_layout, self.kv_layout, self.mask, rank=rank, exchange=exchange)
            for rank in range(self.q_layout.world)
        ]

    def simulate(self, exchange: str) -> Simulation:
        return simulate(self.plans(exchange), self.q_layout, self.kv_layout)


@st.composite
def cases(draw: st.DrawFn, *, fewest: int = 1, most: int = 8) -> Case:
    """Any mask on any two layouts of `fewest` to `most` ranks, with up to 4 dummies."""
    mask, world = draw(masks()), draw(st.integers(fewest, most))
    dummies = st.integers(0, 4)
    q_layout = draw(layouts(mask.q_length + draw(dummies), world))
    if mask.q_length == mask.kv_length and draw(st.booleans()):
        return Case(mask, q_layout, q_layout)
    return Case(mask, q_layout, draw(layouts(mask.kv_length + draw(dummies), world)))


def dealt(length: int, world: int, seed: int) -> Layout:
    """Spans of 1 to 12 positions dealt to random ranks in random order."""
    draw = random.Random(seed)
    edges = [0]
    while edges[-1] < length:
        edges.append(min(edges[-1] + draw.randint(1, 12), length))
    spans = list(pairwise(edges))
    draw.shuffle(spans)
    held: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for span in spans:
        draw.choice(held).append(span)
    return Layout(length, tuple(map(tuple, held)))


DOCUMENTS = (0, 1, 1, 2, 40, 41, 41, 41, 150, 299, 300, 301, 390, 400)
PADDING = ((0, 400), (37, 400), (0, 111), (250, 251), (9, 9))
LONG = {
    "zigzag-16": Case(Mask.causal(517), zigzag(520, 16), zigzag(520, 16)),
    "documents-16": Case(Mask.packed(DOCUMENTS), dealt(400, 16, 0), dealt(400, 16, 0)),
    "padded-16": Case(Mask(400, 400, keys=PADDING), contiguous(400, 16), contiguous(400, 16)),
    "documents-33": Case(Mask.packed(DOCUMENTS), contiguous(401, 33), contiguous(401, 33)),
    "cross-33": Case(Mask.full(300, 211), contiguous(301, 33), zigzag(212, 33)),
    "irregular-33": Case(Mask.causal(350), dealt(350, 33, 1), dealt(355, 33, 2)),
    "zigzag-64": Case(Mask.causal(640), zigzag(640, 64), zigzag(640, 64)),
    "all-64": Case(
        Mask(400, 400, documents=DOCUMENTS, keys=PADDING), zigzag(411, 64), zigzag(411, 64)
    ),
    "full-64": Case(
        Mask.packed(DOCUMENTS, is_causal=False), dealt(400, 64, 3), contiguous(400, 64)
    ),
    "short-64": Case(Mask.causal(50), zigzag(50, 64), contiguous(50, 64)),
}


def check(case: Case, plans: list[Plan]) -> None:
    """Every visible pair once and nothing else; every key's gradient comes home whole."""
    simulation = simulate(plans, case.q_layout, case.kv_layout)
    seen = case.dense()
    assert np.array_equal(simulation.scores(case.shape), seen)
    gradients, _ = simulation.gradients(case.shape[0])
    assert np.array_equal(gradients, seen.sum(1))
    for plan, queries in zip(plans, simulation.queries, strict=True):
        assert plan.work(case.shape[0]) == seen[:, queries].sum()
        assert (plan.q_size, plan.world) == (queries.size, len(plans))


@pytest.mark.parametrize("exchange", EXCHANGES)
@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_visible_pair_is_computed_once(exchange: str, case: Case) -> None:
    check(case, case.plans(exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@settings(deadline=None, max_examples=8)
@given(cases(fewest=9, most=64))
def test_more_ranks_than_a_node_holds(exchange: str, case: Case) -> None:
    check(case, case.plans(exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_large_groups(case: Case, exchange: str) -> None:
    check(case, case.plans(exchange))


def transferred(messages: tuple[tuple[Message, ...], ...], end: str, rank: int) -> int:
    sides = [message for sent in messages for message in sent if getattr(message, end) == rank]
    return sum(message.out.size for message in sides)


@pytest.mark.parametrize("exchange", EXCHANGES)
@quick
@given(cases(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5) | st.none(), st.data())
def test_traffic_is_the_bytes_of_the_messages(
    exchange: str, case: Case, heads: int, head_dim: int, value_dim: int | None, data: st.DataObject
) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["i1", "f2", "f4", "f8"])))
    grad = np.promote_types(dtype, np.float32)
    batch = case.shape[0]
    simulation = case.simulate(exchange)
    _, returned = simulation.gradients(batch)

    def nbytes(rows: int, of: np.dtype[Any]) -> int:
        key = np.empty((batch, heads, rows, head_dim), of)
        value = np.empty((batch, heads, rows, head_dim if value_dim is None else value_dim), of)
        return key.nbytes + value.nbytes

    for rank, plan in enumerate(simulation.plans):
        found = plan.traffic(
            kv_heads=heads,
            head_dim=head_dim,
            itemsize=dtype.itemsize,
            value_dim=value_dim,
            batch=batch,
        )
        sent = nbytes(transferred(simulation.messages, "sender", rank), dtype)
        received = nbytes(transferred(simulation.messages, "receiver", rank), dtype)
        assert (found.forward_sent, found.forward_received) == (sent, received)
        grads = nbytes(transferred(returned, "sender", rank), grad)
        assert found.backward_sent == sent + grads
        grads = nbytes(transferred(returned, "receiver", rank), grad)
        assert found.backward_received == received + grads


def test_traffic_by_hand() -> None:
    plan = build_plan(contiguous(8, 2), contiguous(8, 2), Mask.causal(8), rank=1, exchange="ring")
    row = 2 * 3 * (5 + 7)
    found = plan.traffic(kv_heads=3, head_dim=5, value_dim=7, itemsize=2, batch=2)
    assert found == (0, 4 * row * 2, 4 * row * 4, 4 * row * 2)
    assert plan.traffic(kv_heads=3, head_dim=5, itemsize=8) == (0, 960, 960, 960)


def needs(case: Case, simulation: Simulation) -> list[set[int]]:
    seen = case.dense()
    return [set(np.nonzero(seen[:, queries].sum((0, 1)))[0]) for queries in simulation.queries]


@quick
@given(cases())
def test_ring_carries_what_a_rank_ahead_needs_and_nothing_else(case: Case) -> None:
    simulation = case.simulate("ring")
    world, need = case.q_layout.world, needs(case, simulation)
    for step, buffers in enumerate(simulation.buffers[1:], start=1):
        for rank, buffer in enumerate(buffers):
            shard = set(simulation.buffers[0][(rank - step) % world])
            ahead = set().union(*(need[(rank + hop) % world] for hop in range(world - step)))
            assert buffer.tolist() == sorted(shard & ahead)


@quick
@given(cases())
def test_allgather_brings_every_other_shard_in_global_order(case: Case) -> None:
    simulation = case.simulate("allgather")
    assert len(simulation.buffers) == min(case.q_layout.world, 2)
    for buffers in simulation.buffers[1:]:
        for own, buffer in zip(simulation.buffers[0], buffers, strict=True):
            assert buffer.tolist() == sorted(set(range(case.kv_layout.length)) - set(own))


@pytest.mark.parametrize("exchange", EXCHANGES)
@quick
@given(cases())
def test_only_gradients_of_keys_that_were_seen_go_home(exchange: str, case: Case) -> None:
    simulation = case.simulate(exchange)
    need = needs(case, simulation)
    _, returned = simulation.gradients(case.shape[0])
    for buffers, messages in zip(simulation.buffers[1:], returned, strict=True):
        for rank, buffer in enumerate(buffers):
            mine = [message for message in messages if message.sender == rank]
            rows = [row for message in mine for row in message.out]
            assert sorted(buffer[rows]) == sorted(need[rank] & set(buffer))


def ring(make: Callable[[int, int], Layout], length: int, world: int) -> Simulation:
    layout = make(length, world)
    return Case(Mask.causal(length), layout, layout).simulate("ring")


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_causal_ring_never_sends_the_last_contiguous_shard(world: int) -> None:
    simulation = ring(contiguous, 4 * world, world)
    for plan in simulation.plans:
        for step, found in enumerate(plan.rounds[1:], start=1):
            assert found.size == (4 if step <= plan.rank else 0)
    assert not simulation.plans[-1].rounds[1].sends
    assert all(not found.sends for found in simulation.plans[-1].rounds)
    assert all(not found.receives for found in simulation.plans[0].rounds)


def test_causal_ring_of_two_sends_half_a_zigzag_shard() -> None:
    simulation = ring(zigzag, 16, 2)
    assert simulation.buffers[0][0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert simulation.buffers[1][1].tolist() == [0, 1, 2, 3]
    assert simulation.buffers[1][0].tolist() == list(range(4, 12))
    assert simulation.plans[0].rounds[1].sends == (Transfer(1, ((0, 4),)),)


def test_local_documents_need_no_transfer() -> None:
    layout = contiguous(12, 3)
    for plan in Case(Mask.packed([0, 4, 8, 12]), layout, layout).plans("ring"):
        assert plan.rounds == (
            Round(4, tiles=(Tile((0, 4), (0, 4), True),)),
            Round(0),
            Round(0, relay=True),
        )


def test_neighbouring_tiles_are_joined() -> None:
    layout = contiguous(32, 8)
    last = Case(Mask.causal(32), layout, layout).plans("allgather")[-1]
    assert last.rounds[0].tiles == (Tile((0, 4), (0, 4), True),)
    assert last.rounds[1].tiles == (Tile((0, 4), (0, 28), False),)
    for plan in ring(zigzag, 64, 8).plans:
        assert all(len(found.tiles) == 1 for found in plan.rounds[1:])


def test_a_full_tile_and_the_causal_one_after_it_are_one() -> None:
    queries = Layout(6, (((4, 6),), ((0, 4),)))
    keys = Layout(6, (((0, 2), (4, 6)), ((2, 4),)))
    first = Case(Mask.causal(6), queries, keys).plans("ring")[0]
    assert first.rounds[0].tiles == (Tile((0, 2), (0, 4), True),)


def test_the_triangle_of_a_shard_is_one_tile() -> None:
    for size in (6, 7, 8, 64):
        for plan in ring(zigzag, size, 2).plans:
            assert plan.rounds[0].tiles == (Tile((0, plan.q_size), (0, plan.q_size), True),)
    backwards = Layout(6, (((4, 6), (0, 2)), ((2, 4),)))
    first = Case(Mask.causal(6), backwards, backwards).plans("ring")[0]
    assert len(first.rounds[0].tiles) == 3


def test_a_tile_of_one_query_is_full() -> None:
    layout = contiguous(4, 2)
    plan = Case(Mask.packed([0, 1, 1, 4]), layout, layout).plans("ring")[0]
    assert plan.rounds[0].tiles == (Tile((0, 1), (0, 1), False), Tile((1, 2), (1, 2), False))


def test_batch_rows_of_one_visibility_share_their_tiles() -> None:
    layout = contiguous(8, 2)
    alike = Case(Mask(8, 8, keys=((1, 8), (1, 8))), layout, layout).plans("ring")
    apart = Case(Mask(8, 8, keys=((1, 8), (2, 8))), layout, layout).plans("ring")
    rows = [[t.row for r in group[1].rounds for t in r.tiles] for group in (alike, apart)]
    assert set(rows[0]) == {None}
    assert set(rows[1]) == {0, 1}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_zigzag_shares_causal_work_evenly(exchange: str, world: int) -> None:
    layout = zigzag(4096, world)
    work = [plan.work() for plan in Case(Mask.causal(4096), layout, layout).plans(exchange)]
    assert sum(work) == 4096 * 4097 // 2
    assert max(work) * world <= 1.1 * sum(work)


def test_contiguous_does_not() -> None:
    layout = contiguous(4096, 8)
    work = [plan.work() for plan in Case(Mask.causal(4096), layout, layout).plans("ring")]
    assert max(work) * 8 > 1.8 * sum(work)


@pytest.mark.parametrize(
    ("tile", "pairs"),
    [
        (Tile((0, 3), (0, 5), False), 15),
        (Tile((0, 3), (0, 5), True), 12),
        (Tile((2, 5), (4, 7), True), 6),
        (Tile((0, 1), (0, 5), False), 5),
    ],
)
def test_pairs_of_a_tile(tile: Tile, pairs: int) -> None:
    assert tile.pairs == pairs


def test_work_counts_shared_tiles_once_per_batch_row() -> None:
    tiles = (Tile((0, 2), (0, 2), False), Tile((0, 2), (0, 2), True, row=1))
    plan = Plan(0, 1, "ring", 2, 2, (Round(2, tiles=tiles),))
    assert plan.work() == 4 + 3
    assert plan.work(batch=3) == 3 * 4 + 3


def test_equal_arguments_give_the_same_frozen_plan() -> None:
    plans = [
        build_plan(zigzag(9, 3), zigzag(9, 3), Mask.causal(9), rank=1, exchange="ring")
        for _ in range(2)
    ]
    assert plans[0] is plans[1]
    with pytest.raises(FrozenInstanceError):
        plans[0].rank = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_has_one_round(exchange: str, name: str) -> None:
    layout = LAYOUTS[name](7, 1)
    plan = build_plan(layout, layout, Mask.causal(7), rank=0, exchange=exchange)
    assert plan.rounds == (Round(7, tiles=(Tile((0, 7), (0, 7), True),)),)
    assert plan.traffic(kv_heads=1, head_dim=1, itemsize=2) == (0, 0, 0, 0)


def test_an_unknown_exchange_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_plan(zigzag(8, 2), zigzag(8, 2), Mask.causal(8), rank=0, exchange="rings")
    assert f"'rings' is unknown; use one of {EXCHANGES}" in str(caught.value)


def test_layouts_of_two_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="on 2 ranks and keys on 3; both must be"):
        build_plan(zigzag(8, 2), zigzag(8, 3), Mask.causal(8), rank=0, exchange="ring")


@pytest.mark.parametrize(("q_length", "kv_length"), [(7, 8), (8, 7), (6, 7)])
def test_layouts_shorter_than_the_mask_are_refused(q_length: int, kv_length: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"8 queries and 8 keys, .* only {q_length} and {kv_length}"
    ):
        build_plan(
            zigzag(q_length, 2), zigzag(kv_length, 2), Mask.causal(8), rank=0, exchange="ring"
        )


def shift_rows(found: Round) -> Round:
    peer, ((start, stop), *rest) = found.sends[0]
    moved = Transfer(peer, ((start + 1, stop + 1), *rest))
    return replace(found, sends=(moved, *found.sends[1:]))


def shorten_send(found: Round) -> Round:
    peer, ((start, stop), *rest) = found.sends[0]
    return replace(found, sends=(Transfer(peer, ((start, stop - 1), *rest)), *found.sends[1:]))


def double_tile(found: Round) -> Round:
    return replace(found, tiles=found.tiles[:1] + found.tiles)


def claim_causal(found: Round) -> Round:
    return replace(found, tiles=(found.tiles[0]._replace(causal=True), *found.tiles[1:]))


def widen_tile(found: Round) -> Round:
    (start, stop), tile = found.tiles[0].q, found.tiles[0]
    return replace(found, tiles=(tile._replace(q=(start, stop + 1)), *found.tiles[1:]))


@pytest.mark.parametrize(
    "tamper",
    [
        lambda found: replace(found, sends=()),
        lambda found: replace(found, receives=()),
        lambda found: replace(found, receives=found.receives * 2),
        lambda found: replace(found, size=found.size + 1),
        lambda found: replace(found, returns=()),
        lambda found: replace(found, collects=()),
        lambda found: replace(found, tiles=found.tiles[1:]),
        shift_rows,
        shorten_send,
        double_tile,
        claim_causal,
        widen_tile,
    ],
    ids=[
        "no-send",
        "no-receive",
        "two-receives",
        "large-buffer",
        "no-return",
        "no-collect",
        "no-tile",
        "shift_rows",
        "shorten_send",
        "double_tile",
        "claim_causal",
        "widen_tile",
    ],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_check_notices_a_broken_plan(exchange: str, tamper: Callable[[Round], Round]) -> None:
    case = Case(Mask.causal(24), zigzag(24, 3), zigzag(24, 3))
    plans = case.plans(exchange)
    check(case, plans)
    local, first, *others = plans[1].rounds
    plans[1] = replace(plans[1], rounds=(local, tamper(first), *others))
    with pytest.raises(AssertionError):
        check(case, plans)
