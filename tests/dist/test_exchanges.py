"""What exchanges do besides the right values: bytes, options, refusals, the groups they use."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

from lightning_cp import attend, checkpoint_policy
from lightning_cp.attention import attention
from lightning_cp.comm import p2p
from lightning_cp.context import SLOT
from lightning_cp.diagnostics.trace import CollectiveRecorder
from lightning_cp.errors import MismatchError
from lightning_cp.plan import AllGather, Direct, Hybrid, Plan, Ring, Traffic, Ulysses, build_plan
from tests._harness import oracle
from tests._harness.cases import CELLS, DEFAULT, Cell
from tests._harness.group import one_group
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
                out, lse, *_ = attention(q, k, v, *cell.options)
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


def run_traffic(
    rank: int, world: int, cells: list[Cell], keep: bool
) -> list[tuple[Traffic, list[int]]]:
    """What the plan says and what was counted: sent and received, forward and then backward."""
    found = []
    for cell in cells:
        q, k, v, grad = local(cell, rank)
        context = cell.context(rank, dist.group.WORLD)
        forward, backward = CollectiveRecorder(), CollectiveRecorder()
        with SLOT.activate(context):
            with forward:
                out, _, handle, _ = attention(q, k, v, *cell.options, keep=keep)
            plan = SLOT.bound(int(handle)).plan
            with backward:
                torch.autograd.grad(out, (q, k, v), grad)
        assert isinstance(plan, Plan)
        said = plan.traffic(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=k.shape[3],
            itemsize=k.itemsize,
            batch=k.shape[0],
            kept=keep,
        )
        counted = [log.total(name) for log in (forward, backward) for name in ("send", "recv_")]
        assert {call.name for log in (forward, backward) for call in log.calls} <= {"send", "recv_"}
        found.append((said, counted))
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_what_the_plan_says(world: int, keep: bool, pool: Pool) -> None:
    cells = [cell for cell in CELLS[:DEFAULT] if cell.world == world][::2]
    if keep:
        cells = [cell for cell in cells if cell.exchange in ("ulysses", "hybrid")]
    ranks = pool.run(run_traffic, cells, keep, world=world)
    for rank, found in enumerate(ranks):
        for cell, (said, counted) in zip(cells, found, strict=True):
            assert counted == list(said), f"rank {rank}: {cell}"
    assert any(sum(said) for said, _ in ranks[0]) == (world > 1)


KEEPING: dict[str, Callable[..., Any]] = {
    "plain": lambda f, *args: f(*args),
    "recomputed": lambda f, *args: checkpoint(f, *args, use_reentrant=False),
    "reentrant": lambda f, *args: checkpoint(f, *args, use_reentrant=True),
    "policy": lambda f, *args: checkpoint(
        f, *args, use_reentrant=False, context_fn=checkpoint_policy()
    ),
    "another policy": lambda f, *args: checkpoint(
        f, *args, use_reentrant=False, context_fn=partial(selective, [torch.ops.aten.mm.default])
    ),
    "compiled": lambda f, *args: torch.compile(f, backend="aot_eager")(*args),
}
"""How a call of attention is made."""


def _weigh(found: list[int], x: Tensor) -> Tensor:
    found.append(x.nbytes)
    return x


def _same(x: Tensor) -> Tensor:
    return x


def run_kept(rank: int, world: int, exchange: str, heads: tuple[int, int]) -> dict[str, Any]:
    """By how it is called: what a backward got, bytes saved, and sent; and what the plan says."""
    cell = replace(SIMPLE, world=world, exchange=exchange, length=24, heads=heads)
    first: list[Tensor] = []
    found: dict[str, Any] = {}
    for how, calling in KEEPING.items():
        q, k, v, grad = local(cell, rank)
        saved: list[int] = []
        context, log = cell.context(rank, dist.group.WORLD), CollectiveRecorder()
        with SLOT.activate(context), nullcontext() if how == "compiled" else log:
            with torch.autograd.graph.saved_tensors_hooks(partial(_weigh, saved), _same):
                out = calling(partial(attend, is_causal=True), q, k, v)
            there = log.total("send")
            out.backward(grad)
        first = first or [out, q.grad, k.grad, v.grad]
        for one, other in zip(first, (out, q.grad, k.grad, v.grad), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14, msg=how)
        kept = {ran.kept for ran in context.log.ran if ran.backward}
        found[how] = kept, sum(saved), [there, log.total("send") - there]
    layout = cell.sequence.layout
    plan = build_plan(layout, layout, cell.mask_of(), rank=rank, exchange=exchange)
    said = {"heads": heads[0], "kv_heads": heads[1], "head_dim": k.shape[3], "itemsize": 8}
    found["said"] = [plan.traffic(**said, batch=k.shape[0], kept=kept) for kept in (True, False)]
    return found


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["own heads", "shared heads"])
@pytest.mark.parametrize("exchange", ["ulysses", "hybrid"])
def test_what_arrived_for_heads_is_kept_but_where_it_costs_memory(
    exchange: str, heads: tuple[int, int], pool: Pool
) -> None:
    for found in pool.run(run_kept, exchange, heads, world=4, timeout=100):
        kept, fetched = found.pop("said")
        shared = exchange == "ulysses" and heads[1] < 4
        assert (kept == fetched) == shared
        there = kept.forward_sent
        again, saved = [there, there + kept.backward_sent], found["plain"][1]
        assert found == {
            "plain": ({not shared}, saved, [there, kept.backward_sent]),
            "recomputed": ({not shared}, found["recomputed"][1], again),
            "reentrant": ({not shared}, found["reentrant"][1], again),
            "policy": ({False}, found["policy"][1], [there, fetched.backward_sent]),
            "another policy": (
                {False},
                found["another policy"][1],
                [there, there + fetched.backward_sent],
            ),
            "compiled": ({False}, saved, [0, 0]),  # as many bytes; graphs are not looked into
        }


def run_compiled_alone(rank: int, world: int) -> list[bool]:
    """One rank compiles a call, the other does not; whether it was traced."""
    group = dist.group.WORLD
    cell = replace(SIMPLE, world=world, exchange="ulysses", length=12)
    q, k, v, _ = local(cell, rank)
    call: Callable[..., Tensor] = partial(attend, is_causal=True)
    torch._dynamo.reset()
    if rank:
        call = torch.compile(call, backend="aot_eager")
    context = replace(cell.context(rank, group), meta=group, compare_calls=True)
    with SLOT.activate(context), pytest.raises(MismatchError, match="keeps heads"):
        call(q, k, v)
    return [context.log.traced]


def test_a_rank_that_compiles_alone_is_told(pool: Pool) -> None:
    assert pool.run(run_compiled_alone, world=2) == [[False], [True]]


def run_traced(rank: int, world: int) -> list[bool]:
    """Whether anything is kept in each of three micro-steps; a call is traced in the second."""
    found = []
    with one_group(rank, world, exchange="ulysses") as parallel:
        for traced in (False, True, False):
            shard = parallel.shard({"inputs_embeds": torch.zeros(1, 8, 2)})
            shard.context.log.traced = traced
            found.append(shard.context.keeps)
    return found


def test_nothing_is_kept_after_a_call_was_traced(pool: Pool) -> None:
    assert pool.run(run_traced, world=2) == [[True, True, False]] * 2


def run_compiled_autograd(rank: int, world: int) -> None:
    cell = replace(SIMPLE, world=world, exchange="ulysses", length=12)
    found = []
    for compiled in (False, True):
        q, k, v, grad = local(cell, rank)
        watched = torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend="eager"))
        with SLOT.activate(cell.context(rank, dist.group.WORLD)):
            out = attend(q, k, v, is_causal=True)
            with watched if compiled else nullcontext():
                out.backward(grad)
        found.append([q.grad, k.grad, v.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_was_kept_in_a_compiled_backward(pool: Pool) -> None:
    pool.run(run_compiled_autograd, world=2)
