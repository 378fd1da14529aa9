"""What all ranks do together is the sum of what their plans say, with any mask and layouts."""

from dataclasses import replace

import pytest
from hypothesis import given

from lightning_cp.layout import contiguous
from lightning_cp.mask import Mask
from lightning_cp.plan import PlanKey, group_load
from tests._harness.planned import EXCHANGES, Case, cases

SIZES = {"kv_heads": 3, "head_dim": 5, "value_dim": 7}


def key_of(case: Case, exchange: str) -> PlanKey:
    return PlanKey(case.q_layout, case.kv_layout, case.mask, 0, exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
@given(case=cases())
def test_work_and_bytes_are_those_of_the_plans(exchange, case):
    load, plans, rows = group_load(key_of(case, exchange)), case.plans(exchange), case.shape[0]
    assert load.work(rows) == tuple(plan.work(rows) for plan in plans)
    for itemsize in (2, 8):
        found = [plan.traffic(itemsize=itemsize, batch=rows, **SIZES) for plan in plans]
        sizes = {"row": rows * 3 * 12, "itemsize": itemsize}
        assert load.bytes(backward=False, **sizes) == sum(x.forward_received for x in found)
        assert load.bytes(backward=True, **sizes) == sum(x.backward_received for x in found)
        assert load.bytes(backward=True, **sizes) == sum(x.backward_sent for x in found)


def test_a_call_by_hand():
    """Rank 0 holds 3 of 5 tokens; rank 1 needs all of them."""
    load = group_load(PlanKey(contiguous(5, 2), contiguous(5, 2), Mask.causal(5), 0, "direct"))
    assert load.work(batch=2) == (2 * (1 + 2 + 3), 2 * (4 + 5))
    assert load.received == load.returned == (0, 3)
    assert load.bytes(row=10, itemsize=2, backward=False) == 3 * 10 * 2
    assert load.bytes(row=10, itemsize=2, backward=True) == 3 * 10 * (2 + 4)


def test_a_key_builds_the_plan_of_its_rank():
    layout = contiguous(5, 2)
    key = PlanKey(layout, layout, Mask.causal(5), 1, "ring")
    assert key.build().work() == 4 + 5
    assert key._replace(rank=0).build().work() == 1 + 2 + 3
    other = key._replace(mask=replace(key.mask, is_causal=False))
    assert other != key
    assert other.build().work() == 2 * 5
