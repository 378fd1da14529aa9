"""What all ranks do together is the sum of what their plans say, with any mask and layouts."""

from dataclasses import replace

import pytest
from hypothesis import given

from lightning_cp.layout import contiguous
from lightning_cp.mask import Mask
from lightning_cp.plan import Direct, Hybrid, PlanKey, Replicated, Sizes, group_load
from tests._harness.planned import EXCHANGES, Case, cases

SIZES = {"heads": 9, "kv_heads": 3, "head_dim": 5, "value_dim": 7}


def key_of(case: Case, exchange: str) -> PlanKey:
    return PlanKey(case.q_layout, case.kv_layout, case.mask, 0, exchange)


@pytest.mark.parametrize(
    "exchange",
    [*EXCHANGES, Direct(half_grads=True), Hybrid(half_grads=True), Replicated()],
    ids=str,
)
@given(case=cases())
def test_work_and_bytes_are_those_of_the_plans(exchange, case):
    load, plans, rows = group_load(key_of(case, exchange)), case.plans(exchange), case.shape[0]
    for itemsize in (2, 8):
        found = [plan.traffic(itemsize=itemsize, batch=rows, **SIZES) for plan in plans]
        sizes = Sizes(batch=rows, itemsize=itemsize, state=8, **SIZES)
        assert load.work(sizes) == tuple(
            plan.work(rows) * plan.own_heads(9, 3)[0] for plan in plans
        )
        assert load.bytes(sizes, backward=False) == sum(x.forward_received for x in found)
        assert load.bytes(sizes, backward=True) == sum(x.backward_received for x in found)
        assert load.bytes(sizes, backward=True) == sum(x.backward_sent for x in found)


def test_a_call_by_hand():
    """Rank 0 holds 3 of 5 tokens; rank 1 needs all of them."""
    load = group_load(PlanKey(contiguous(5, 2), contiguous(5, 2), Mask.causal(5), 0, "direct"))
    sizes = Sizes(2, 1, 1, 2, 3, 2, 4)
    assert load.work(sizes) == (2 * (1 + 2 + 3), 2 * (4 + 5))
    assert load.received == load.returned == (0, 3)
    assert load.bytes(sizes, backward=False) == 3 * 10 * 2
    assert load.bytes(sizes, backward=True) == 3 * 10 * (2 + 4)


def test_a_key_builds_the_plan_of_its_rank():
    layout = contiguous(5, 2)
    key = PlanKey(layout, layout, Mask.causal(5), 1, "ring")
    assert key.build().work() == 4 + 5
    assert key._replace(rank=0).build().work() == 1 + 2 + 3
    other = key._replace(mask=replace(key.mask, is_causal=False))
    assert other != key
    assert other.build().work() == 2 * 5
