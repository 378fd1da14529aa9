"""What exchanges do besides the right values: options, refusals, and the groups they use."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import attend
from lightning_cp.attention import attention
from lightning_cp.comm import p2p
from lightning_cp.context import SLOT
from lightning_cp.diagnostics.trace import CollectiveRecorder
from lightning_cp.plan import AllGather, Direct, Hybrid, Ring, Ulysses
from tests._harness import oracle
from tests._harness.cases import Cell
from tests._harness.pool import Pool
from tests.dist.test_attention import SIMPLE, judge, local, unpickled

pytestmark = pytest.mark.dist

NARROW = [
    ("direct", Direct(half_grads=True)),
    ("ring", Ring(half_grads=True)),
    ("allgather", AllGather(half_grads=True)),
    ("ulysses", Ulysses(half_grads=True)),
    ("hybrid", Hybrid(2, half_grads=True)),
]


def run_narrow(rank: int, world: int, dtype: str) -> bytes:
    """Every exchange with gradients that travel in the dtype of the keys, and as usual."""
    found: dict[str, Any] = {}
    for name, schedule in NARROW:
        for key, exchange in ((name, name), (f"{name} narrow", schedule)):
            cell = replace(SIMPLE, world=world, length=37, heads=(6, 2), dtype=dtype)
            context = replace(cell.context(rank, dist.group.WORLD), exchange=exchange)
            q, k, v, grad = local(cell, rank)
            with SLOT.activate(context), CollectiveRecorder() as log:
                out, lse, _ = attention(q, k, v, *cell.options)
                grads = torch.autograd.grad(out, (q, k, v), grad)
            answer = oracle.Answer(out.detach(), lse.detach(), *grads)
            found[key] = (answer, log.total("send"))
    return pickle.dumps(found)


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_gradients_that_travel_in_half_precision(dtype: str, pool: Pool) -> None:
    cell = replace(SIMPLE, world=4, length=37, heads=(6, 2), dtype=dtype)
    ranks = unpickled(pool.run(run_narrow, dtype, world=4))
    for name, _ in NARROW:
        usual, narrow = ([found[key] for found in ranks] for key in (name, f"{name} narrow"))
        judge(cell, [answer for answer, _ in narrow])
        for (one, sent), (other, fewer) in zip(usual, narrow, strict=True):
            for x in ("out", "lse", "dq"):
                assert torch.equal(getattr(one, x), getattr(other, x)), f"{name}: {x}"
            assert fewer < sent if dtype == "bf16" and sent else fewer == sent, name


def third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Hides every third key, another one for each head and query, but never a query's own."""
    return ((q + k + h) % 3 != 0) | (q == k)


def with_terms(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and all gradients of a call with numbers of every head: 6 query heads."""
    steps = torch.arange(6, dtype=torch.float64)
    learned = [steps.cos(), steps / 7, torch.stack([(steps[:5] + n).sin() for n in range(6)])]
    inputs = [x.requires_grad_() for x in (q, k, v, *learned)]
    sinks, slopes, table = learned
    out = attend(
        *inputs[:3],
        is_causal=True,
        scale=0.3,
        softcap=2.0,
        sinks=sinks,
        alibi_slopes=slopes,
        relative_bias=table,
        mask_mod=third,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def terms_cell(world: int, exchange: str) -> Cell:
    return replace(
        SIMPLE, world=world, exchange=exchange, heads=(6, 2), length=13, kernel="reference"
    )


def run_terms(rank: int, world: int, exchange: str) -> bytes:
    cell = terms_cell(world, exchange)
    with SLOT.activate(cell.context(rank, dist.group.WORLD)):
        return pickle.dumps(with_terms(*local(cell, rank)))


@pytest.mark.parametrize(("exchange", "world"), [("ulysses", 3), ("ulysses", 4), ("hybrid", 4)])
def test_numbers_of_heads_go_with_their_heads(exchange: str, world: int, pool: Pool) -> None:
    cell = terms_cell(world, exchange)
    layout = cell.sequence.layout
    ranks = unpickled(pool.run(run_terms, exchange, world=world))
    expected = with_terms(*cell.tensors())
    names = ("out", "dq", "dk", "dv", "sinks", "slopes", "table")
    for number, (name, truth) in enumerate(zip(names, expected, strict=True)):
        parts = [found[number] for found in ranks]
        got = layout.unshard(parts, dim=2) if number < 4 else sum(parts)
        torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-12, msg=name)


def run_too_few_heads(rank: int, world: int) -> None:
    cell = replace(SIMPLE, world=world, exchange="ulysses", heads=(2, 1), length=9)
    q, k, v, _ = local(cell, rank)
    with SLOT.activate(cell.context(rank, dist.group.WORLD)):
        attend(q, k, v, is_causal=True)


def test_fewer_heads_than_ranks_are_refused_on_every_rank(pool: Pool) -> None:
    for failure in pool.failures(run_too_few_heads, world=3):
        assert failure.kind == "RefusedError"
        assert "3 ranks swap heads for tokens and each needs a query head, but the call has 2" in (
            failure.message
        )


def run_on_two_groups(rank: int, world: int) -> tuple[set[str], set[str]]:
    """Names of the groups that keys travel on, and those that heads are swapped on."""
    keys, heads = dist.new_group(), dist.new_group()
    cell = replace(SIMPLE, world=world, exchange="hybrid", length=16)
    q, k, v, grad = local(cell, rank)
    seen: list[tuple[str, int]] = []
    start = p2p.dist.batch_isend_irecv

    def watch(operations: list[Any]) -> Any:
        seen.extend((op.group.group_name, op.group_peer) for op in operations)
        return start(operations)

    p2p.dist.batch_isend_irecv = watch
    try:
        with SLOT.activate(replace(cell.context(rank, keys), a2a=heads)):
            out, *_ = attention(q, k, v, *cell.options)
            torch.autograd.grad(out, (q, k, v), grad)
    finally:
        p2p.dist.batch_isend_irecv = start
    own = rank // 2 * 2
    for name, peer in seen:
        assert (peer in (own, own + 1)) == (name == heads.group_name)
    return {name for name, _ in seen}, {keys.group_name, heads.group_name}


def test_heads_and_keys_travel_on_groups_of_their_own(pool: Pool) -> None:
    for found, groups in pool.run(run_on_two_groups, world=4):
        assert found == groups
