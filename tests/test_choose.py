"""The choice of layout and exchange: prices by hand, and exchanges of any name."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from lightning_cp.balance import Banded, Causal, CostModel, Work, layout_of
from lightning_cp.mask import Mask
from lightning_cp.plan import (
    EXCHANGES,
    SCHEDULES,
    AllGather,
    Call,
    Direct,
    Plan,
    Ulysses,
    build_plan,
    known_calls,
    quickest,
    seconds,
)
from lightning_cp.plan.price import WIDE, cost_of
from lightning_cp.plan.schedule import Demand
from lightning_cp.spans import Spans

NAMES = ("zigzag", "contiguous", "balanced")
FREE = {"token": 0.0, "tile": 0.0, "latency": 0.0}


def chosen(
    lengths: tuple[int, ...],
    *,
    work: Work | None = None,
    calls: tuple[Call, ...] = (WIDE,),
    names: tuple[str, ...] = NAMES,
    exchanges: tuple[str, ...] = EXCHANGES,
    world: int = 4,
) -> tuple[str, object]:
    layouts = tuple(layout_of(name, lengths, world, work=work) for name in names)
    found = quickest(layouts, exchanges, lengths, work or Causal(), calls)
    return names[found.layout], found.exchange


def of_two(exchange: Direct | AllGather, rank: int) -> Plan:
    """Eight tokens, the first four on rank 0; rank 1 receives four keys."""
    layout = layout_of("contiguous", (8,), 2)
    return build_plan(layout, layout, Mask(8, 8), rank=rank, exchange=exchange)


def test_the_price_of_two_ranks_by_hand() -> None:
    call = Call(heads=2, kv_heads=2, head_dim=3, value_dim=1, itemsize=2)
    cost = CostModel(pair=7.0, bandwidth=4.0, **FREE)
    # A key and its value are 2 heads of 4 elements of 2 bytes: 16 bytes, their gradient 32.
    fetched, homing = 4 * 16 / 4, 4 * 32 / 4
    whole = Direct(head_chunks=1)
    assert of_two(whole, 0).work() == 10
    # Forward: rank 0 only sends, while it computes. Backward: gradients arrive besides.
    assert seconds(of_two(whole, 0), call, cost) == pytest.approx(7 * 10)
    # Rank 1 computes its own tile while the keys arrive, and then the other; the gradients that
    # leave are more than the keys that arrive.
    own, other = 7 * 10, 7 * 16
    expected = max(own * 2 / 7, fetched) + other * 2 / 7
    expected += max(own * 5 / 7, homing) + other * 5 / 7
    assert seconds(of_two(whole, 1), call, cost) == pytest.approx(expected)


def test_swaps_of_heads_have_a_price() -> None:
    layout = layout_of("contiguous", (8,), 2)
    call = Call(heads=4, kv_heads=2, head_dim=1, value_dim=1, itemsize=2)
    plan = build_plan(layout, layout, Mask(8, 8), rank=0, exchange=Ulysses(head_chunks=1))
    calls = CostModel(pair=0.0, token=0.0, tile=0.0, latency=5.0, bandwidth=1e30)
    # Inputs and results; output with its gradient, and gradients: with one other rank.
    assert seconds(plan, call, calls) == pytest.approx(5 * (2 + 2))
    pairs = CostModel(pair=4.0, token=0.0, tile=0.0, latency=0.0, bandwidth=1e30)
    assert seconds(plan, call, pairs) == pytest.approx(4 * 36 * 2 / 4)  # two of four heads
    link = CostModel(pair=0.0, token=0.0, tile=0.0, latency=0.0, bandwidth=2.0)
    traffic = plan.traffic(heads=4, kv_heads=2, head_dim=1, itemsize=2, kept=True)
    expected = max(traffic.forward_sent, traffic.forward_received)
    expected += max(traffic.backward_sent, traffic.backward_received)
    assert seconds(plan, call, link) == pytest.approx(expected / 2)


def test_tokens_tiles_and_messages_have_a_price() -> None:
    call = Call(heads=1, kv_heads=1, head_dim=1, value_dim=1, itemsize=2)
    plan = of_two(Direct(head_chunks=1), 1)
    still = CostModel(pair=0.0, token=3.0, tile=0.0, latency=0.0, bandwidth=1e30)
    assert seconds(plan, call, still) == pytest.approx(3 * 4)
    calls = CostModel(pair=0.0, token=0.0, tile=0.0, latency=5.0, bandwidth=1e30)
    # Keys arrive in the forward and again in the backward, and gradients leave.
    assert seconds(plan, call, calls) == pytest.approx(3 * 5)
    tiles = CostModel(pair=1.0, token=0.0, tile=8.0, latency=0.0, bandwidth=1e30)
    # Two tiles of 4 queries: 10 pairs, 2.5 for each query, and 16 pairs, 4 for each.
    assert seconds(plan, call, tiles) == pytest.approx(10 + 8 * 2.5 + 16 + 8 * 4)


def test_the_quickest_layout_of_a_row() -> None:
    assert chosen((50000,)) == ("zigzag", "direct")
    assert chosen((20000, 9000, 9000, 3000), exchanges=("direct",))[0] == "balanced"
    assert chosen((20000, 9000, 9000, 3000))[0] == "balanced"
    assert chosen((4000,) * 8)[0] == "zigzag"  # two whole documents each
    assert chosen((50000,), work=Banded(None, None))[0] == "zigzag"  # as fast as contiguous


def test_before_a_call_was_seen_the_first_exchange_is_taken() -> None:
    for lengths in ((300,), (20000, 9000, 9000, 3000)):
        assert chosen(lengths, calls=())[1] == EXCHANGES[0]


def test_every_rank_and_every_order_of_calls_gives_one_choice() -> None:
    narrow, wide = Call(2, 1, 8, 8, 4), Call(16, 4, 64, 64, 2)
    assert known_calls([narrow, wide, narrow]) == known_calls([wide, narrow]) == (wide, narrow)
    assert cost_of(WIDE) == CostModel()
    found = cost_of(narrow)
    assert found.pair == pytest.approx(CostModel().pair * 2 * 8 / 4096)
    assert found.token == pytest.approx(CostModel().token * (16 / 4096) ** 2)
    assert found.key_bytes == pytest.approx(CostModel().key_bytes * 8 * 2 / 1024)


def test_busy_ranks_of_a_large_group_stand_for_all() -> None:
    lengths = (9000, 5000, 5000, 700, 300)
    layout = layout_of("contiguous", lengths, 12)
    found = quickest((layout,), ("direct",), lengths, Causal(), (WIDE,)).seconds
    mask = Causal().mask(lengths)
    plans = [build_plan(layout, layout, mask, rank=r, exchange="direct") for r in range(12)]
    assert found == max(seconds(plan, WIDE, cost_of(WIDE)) for plan in plans)


@dataclass(frozen=True)
class Magic:
    """An exchange in which nothing travels; wrong, but its plans say so."""

    head_chunks: int = 1
    half_grads: bool = False
    name: ClassVar[str] = "magic"
    relay: ClassVar[bool] = False

    def block(self, world: int) -> int:
        """Heads stay where they are."""
        return 1

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """Nothing."""
        return ()


def test_an_exchange_is_chosen_by_what_its_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "magic", Magic)  # type: ignore[arg-type]
    exchanges = (*EXCHANGES, "magic")
    assert chosen((512,), exchanges=exchanges) == ("zigzag", "magic")

    def refused(plan: Plan, heads: int, *, dropout: bool = False) -> str | None:
        return "too few heads" if plan.exchange == "magic" and heads < 9 else None

    monkeypatch.setattr(Plan, "rejects", refused)
    assert chosen((513,), exchanges=exchanges)[1] == "magic"
    few = known_calls([WIDE, WIDE._replace(heads=8)])
    assert chosen((514,), exchanges=exchanges, calls=few)[1] == "direct"


def test_an_exchange_that_needs_much_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering needs the whole sequence: more than twice of what two shards do, on 16 ranks."""
    monkeypatch.setattr("lightning_cp.plan.choose.LEAST", 0.0)
    quickest.cache_clear()
    call = Call(8, 8, 64, 64, 2)
    for world, expected in ((2, "allgather"), (16, "direct")):
        lengths = (world * 512,)
        layout = layout_of("zigzag", lengths, world)
        offered = (Direct(head_chunks=2), AllGather(head_chunks=1))  # many messages, or few
        found = quickest((layout,), offered, lengths, Causal(), (call,))
        assert found.exchange.name == expected
