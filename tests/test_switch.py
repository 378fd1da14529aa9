"""Heads dealt out to ranks, and plans whose ranks swap heads for tokens, without a process."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.errors import ConfigError
from lightning_cp.kernels import KERNELS
from lightning_cp.layout import LAYOUTS, Layout, contiguous, zigzag
from lightning_cp.mask import Mask
from lightning_cp.plan import Hybrid, Plan, Schedule, Tile, Traffic, Ulysses, build_plan, uniform
from lightning_cp.plan.heads import Heads, portions, shares
from tests._harness import turns
from tests._harness.planned import Case, cases

SDPA = KERNELS["sdpa"]

HEADS = [(n * ratio, n) for n, ratio in product((1, 2, 3, 5, 8), (1, 2, 4, 7))]


def read(heads: Heads, ratio: int) -> list[tuple[int, int]]:
    """Query heads with the key head of each."""
    return [(q, q // ratio) for q in range(*heads.q)]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_every_query_head_has_one_rank_that_has_its_key_head(heads: int, kv_heads: int) -> None:
    ratio = heads // kv_heads
    for parts in range(1, heads + 1):
        found = shares(heads, kv_heads, parts)
        assert [q for share in found for q in range(*share.q)] == list(range(heads))
        counts = [share.counts[0] for share in found]
        assert max(counts) - min(counts) <= 1
        for share in found:
            assert {kv for _, kv in read(share, ratio)} == set(range(*share.kv))
        if kv_heads % parts == 0:
            assert sum(share.counts[1] for share in found) == kv_heads


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_portions_and_groups_are_the_share(heads: int, kv_heads: int) -> None:
    ratio = heads // kv_heads
    for parts in range(1, heads + 1):
        for share in shares(heads, kv_heads, parts):
            for count in range(1, share.counts[1] + 1):
                cut = portions(share, ratio, count)
                assert len(cut) == count
                assert [x for p in cut for x in read(p, ratio)] == read(share, ratio)
                assert [kv for p in cut for kv in range(*p.kv)] == list(range(*share.kv))
            groups = uniform(share, ratio)
            assert [x for g in groups for x in read(g, ratio)] == read(share, ratio)
            for group in groups:
                readers = Counter(kv for _, kv in read(group, ratio))
                assert set(readers) == set(range(*group.kv))
                assert len(set(readers.values())) == 1
            assert len(groups) <= 3


def test_groups_by_hand() -> None:
    assert shares(8, 2, 3) == (
        Heads((0, 2), (0, 1)),
        Heads((2, 5), (0, 2)),
        Heads((5, 8), (1, 2)),
    )
    assert uniform(Heads((2, 5), (0, 2)), 4) == (Heads((2, 4), (0, 1)), Heads((4, 5), (1, 2)))
    assert uniform(Heads((3, 14), (0, 4)), 4) == (
        Heads((3, 4), (0, 1)),
        Heads((4, 12), (1, 3)),
        Heads((12, 14), (3, 4)),
    )
    assert Heads((12, 14), (3, 4)).within(Heads((3, 14), (0, 4))) == Heads((9, 11), (3, 4))


def sized(case: Case, data: st.DataObject) -> Schedule:
    """An exchange with blocks of two or more ranks where there can be some."""
    world = case.q_layout.world
    size = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    if size == world:
        return Ulysses()
    return Hybrid(size, data.draw(st.sampled_from(["direct", "ring"])))


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_bytes_are_those_of_rows_and_heads_that_change_place(
    case: Case, data: st.DataObject
) -> None:
    """Counted token by token and head by head."""
    schedule = sized(case, data)
    plans = case.plans(schedule)
    size, world = schedule.block(case.q_layout.world), case.q_layout.world
    kv_heads, ratio, dim, value = (data.draw(st.integers(1, 4)) for _ in range(4))
    heads = kv_heads * max(ratio, -(-size // kv_heads))
    item, batch = data.draw(st.sampled_from([2, 4, 8])), case.shape[0]
    wide = max(item, 4)
    of_member = shares(heads, kv_heads, size)
    keep = data.draw(st.booleans())
    lent = sum(share.counts[1] for share in of_member) > kv_heads
    forward, backward = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for reader, owner in product(range(world), range(world)):
        if reader == owner or reader // size != owner // size:
            continue
        q, kv = of_member[reader % size].counts
        rows, keys = case.q_layout.size(owner) * batch, case.kv_layout.size(owner) * batch
        there = (rows * q * dim + keys * kv * (dim + value)) * item
        forward[owner, reader] += there
        again = 0 if keep and not lent else there
        forward[reader, owner] += rows * q * (value * item + wide)
        backward[owner, reader] += again + rows * q * (2 * value * item + wide)
        grads = keys * kv * (dim + value) * (wide if lent else item)
        backward[reader, owner] += grads + rows * q * dim * item
    plain = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "value_dim": value,
        "itemsize": item,
        "batch": batch,
    }
    for plan in plans:
        own = of_member[plan.rank % size].counts
        assert plan.own_heads(heads, kv_heads) == own
        between = replace(plan, switch=None).traffic(**{**plain, "kv_heads": own[1]})
        found = [
            sum(n for pair, n in moved.items() if pair[end] == plan.rank)
            for moved in (forward, backward)
            for end in (0, 1)
        ]
        assert plan.traffic(**plain, kept=keep) == Traffic(
            *map(sum, zip(between, found, strict=True))
        )


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_ulysses_cuts_a_mask_as_one_device_does(layout: str, world: int) -> None:
    held = LAYOUTS[layout](640, world)
    for rank in range(world):
        plan = build_plan(held, held, Mask.causal(640), rank=rank, exchange="ulysses")
        assert [step.tiles for step in plan.rounds] == [(Tile((0, 640), (0, 640), True),)]
        assert plan.work() == 640 * 641 // 2


def work(plans: list[Plan], heads: int, kv_heads: int) -> list[int]:
    return [plan.work() * plan.own_heads(heads, kv_heads)[0] for plan in plans]


@pytest.mark.parametrize("exchange", [Ulysses(), Hybrid(2), Hybrid(4), Hybrid(8, "ring")])
def test_work_of_all_heads_is_shared(exchange: Schedule) -> None:
    layout = zigzag(4096, 8)
    plans = Case(Mask.causal(4096), layout, layout).plans(exchange)
    found = work(plans, 16, 4)
    assert sum(found) == 16 * 4096 * 4097 // 2
    assert max(found) * 8 <= 1.05 * sum(found)


@pytest.mark.parametrize(
    ("world", "size"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (7, 1), (9, 3), (64, 8)]
)
def test_blocks_of_a_hybrid_are_of_about_the_square_root(world: int, size: int) -> None:
    assert Hybrid().block(world) == size
    assert Ulysses().block(world) == world


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ulysses_size=4 does not divide the 6 ranks .* \[1, 2"):
        build_plan(zigzag(8, 6), zigzag(8, 6), Mask.causal(8), rank=0, exchange=Hybrid(4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hybrid(0), "ulysses_size=0 must be a positive integer"),
        (lambda: Hybrid(True), "ulysses_size=True must be a positive integer"),
        (lambda: Hybrid(2, "allgather"), "outer='allgather' is unknown; use one of"),
        (lambda: Ulysses(0), "head_chunks=0 must be a positive integer"),
        (lambda: Ulysses(half_grads=1), "half_grads=1 must be True"),
    ],
)
def test_bad_options(make: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert says in str(caught.value)


def rejects(world: int, heads: int) -> str:
    layout = contiguous(8, world)
    plan = build_plan(layout, layout, Mask.causal(8), rank=0, exchange="ulysses")
    return plan.rejects(heads) or ""


def test_fewer_heads_than_ranks_are_refused_with_the_way_out() -> None:
    assert "6 ranks swap heads for tokens and each needs a query head, but the call has 4" in (
        rejects(6, 4)
    )
    assert "Hybrid(ulysses_size=3) of lightning_cp.plan or 'direct'" in rejects(6, 4)
    assert rejects(5, 4).endswith("use exchange='direct'")
    assert rejects(4, 4) == ""


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_a_head_goes_where_it_is_read(kv_heads: int) -> None:
    layout = Layout(12, (((0, 3), (9, 12)), ((3, 9),)))
    plans = Case(Mask.causal(12), layout, layout).plans("ulysses")
    assert plans[0].own_heads(8, kv_heads) == (4, max(1, kv_heads // 2))
    switch = plans[0].switch
    assert switch is not None
    assert switch.q == (((0, 3), (9, 12)), ((3, 9),))
    assert switch.shared(8, kv_heads) == (kv_heads == 1)


@pytest.mark.parametrize("world", [3, 6])
def test_members_with_more_groups_of_heads_take_more_turns(world: int) -> None:
    """Of 8 query heads on 2 key heads, the second of three members reads both key heads."""
    counts = [len(uniform(share, 4)) for share in shares(8, 2, 3)]
    assert counts == [1, 2, 1]
    inputs = turns.tensors(53, heads=(8, 2))
    mask = Mask.packed((0, 17, 25, 53), is_causal=False)
    found = turns.run(turns.group(world, Hybrid(3, "ring"), "zigzag", mask), SDPA, inputs)
    alone = turns.run(turns.group(1, "direct", "contiguous", mask), SDPA, inputs)
    for x, y in zip(alone, found, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-13)
