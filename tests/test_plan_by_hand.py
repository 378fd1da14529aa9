"""Plans whose rounds, tiles and work can be written down, and what no plan is built for."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS, Layout, contiguous, zigzag
from lightning_cp.mask import Mask
from lightning_cp.plan import Plan, Round, Tile, Transfer, build_plan
from tests._harness.planned import EXCHANGES, Case
from tests._harness.simulate import Simulation


def test_traffic_by_hand() -> None:
    plan = build_plan(contiguous(8, 2), contiguous(8, 2), Mask.causal(8), rank=1, exchange="ring")
    row = 2 * 3 * (5 + 7)
    found = plan.traffic(kv_heads=3, head_dim=5, value_dim=7, itemsize=2, batch=2)
    assert found == (0, 4 * row * 2, 4 * row * 4, 4 * row * 2)
    assert plan.traffic(kv_heads=3, head_dim=5, itemsize=8) == (0, 960, 960, 960)


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
            Round(4, tiles=(Tile((0, 4), (0, 4), True),), keys=layout.spans[plan.rank]),
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
    plans = Case(Mask.causal(4096), layout, layout).plans(exchange)
    work = [plan.work() * plan.own_heads(16, 4)[0] for plan in plans]
    assert sum(work) == 16 * 4096 * 4097 // 2
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
    assert plan.rounds == (Round(7, tiles=(Tile((0, 7), (0, 7), True),), keys=((0, 7),)),)
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
