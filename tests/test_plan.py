"""Plans of whole groups, simulated on positions, against the dense mask."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.layout import Layout, contiguous, zigzag
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES, Plan, Round, Transfer
from tests._harness.planned import EXCHANGES, Case, cases
from tests._harness.simulate import Message, Simulation, simulate

SWAPPING = ("hybrid", "ulysses")
quick = settings(deadline=None, max_examples=60)


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
    """Of every head each visible pair once and nothing else; every gradient comes home whole."""
    for part, group in case.parts(plans):
        check_group(part, group)


def check_group(case: Case, plans: list[Plan]) -> None:
    simulation = simulate(plans, case.q_layout, case.kv_layout)
    seen = case.dense()
    assert np.array_equal(simulation.scores(case.shape), seen)
    gradients, _ = simulation.gradients(case.shape[0])
    assert np.array_equal(gradients, seen.sum(1))
    for plan, queries in zip(plans, simulation.queries, strict=True):
        assert plan.work(case.shape[0]) == seen[:, queries].sum()
        assert (plan.q_size, plan.world) == (queries.size, len(plans))


@pytest.mark.parametrize("exchange", EXCHANGES)
@settings(deadline=None, max_examples=60)
@given(cases())
def test_every_visible_pair_is_computed_once(exchange: str, case: Case) -> None:
    check(case, case.plans(exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@settings(deadline=None, max_examples=8)
@given(cases(fewest=9, most=64))
def test_more_ranks_than_a_node_holds(exchange: str, case: Case) -> None:
    check(case, case.plans(exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.full if name.endswith("-64") else ())
        for name, case in LONG.items()
    ],
)
def test_large_groups(case: Case, exchange: str) -> None:
    check(case, case.plans(exchange))


def transferred(messages: tuple[tuple[Message, ...], ...], end: str, rank: int) -> int:
    sides = [message for sent in messages for message in sent if getattr(message, end) == rank]
    return sum(message.out.size for message in sides)


@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name not in SWAPPING])
@quick
@given(cases(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5) | st.none(), st.data())
def test_traffic_is_the_bytes_of_the_messages(
    exchange: str, case: Case, heads: int, head_dim: int, value_dim: int | None, data: st.DataObject
) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["i1", "f2", "f4", "f8"])))
    half = data.draw(st.booleans())
    grad = dtype if half else np.promote_types(dtype, np.float32)
    batch = case.shape[0]
    plans = case.plans(SCHEDULES[exchange](half_grads=half))
    simulation = simulate(plans, case.q_layout, case.kv_layout)
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
    for part, plans in case.parts(case.plans(exchange)):
        simulation = simulate(plans, part.q_layout, part.kv_layout)
        need = needs(part, simulation)
        _, returned = simulation.gradients(part.shape[0])
        for buffers, messages in zip(simulation.buffers[1:], returned, strict=True):
            for rank, buffer in enumerate(buffers):
                mine = [message for message in messages if message.sender == rank]
                rows = [row for message in mine for row in message.out]
                assert sorted(buffer[rows]) == sorted(need[rank] & set(buffer))


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
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name not in SWAPPING])
def test_the_check_notices_a_broken_plan(exchange: str, tamper: Callable[[Round], Round]) -> None:
    case = Case(Mask.causal(24), zigzag(24, 3), zigzag(24, 3))
    plans = case.plans(exchange)
    check(case, plans)
    local, first, *others = plans[1].rounds
    plans[1] = replace(plans[1], rounds=(local, tamper(first), *others))
    with pytest.raises(AssertionError):
        check(case, plans)
