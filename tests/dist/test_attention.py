"""Attention over a group of ranks equals attention over the whole sequence, in every cell."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp import attend
from lightning_cp.attention import attention
from lightning_cp.context import SLOT, CallLog, Context
from lightning_cp.layout import LAYOUTS
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES
from lightning_cp.sequences import Sequence
from tests._harness import oracle
from tests._harness.cases import (
    AXES,
    CELLS,
    DEFAULT,
    DTYPES,
    EVERYTHING,
    TRIPLES,
    Cell,
    all_pairs,
    pairs_of,
    triples,
)
from tests._harness.pool import Pool
from tests._harness.tolerance import assert_as_accurate

pytestmark = pytest.mark.dist

NAMES = oracle.Answer._fields
SIMPLE = Cell(2, "ring", "zigzag", "causal", 8, 2, (4, 2), 4, "fp64", "sdpa", 0, "contiguous")


def local(cell: Cell, rank: int) -> list[Tensor]:
    """This rank's q, k, v and gradient of the output, with the strides of the cell."""
    layout = cell.sequence.layout
    whole = cell.tensors()
    q, k, v, grad = (layout.shard(x, rank=rank, dim=2) for x in whole)
    if cell.strides == "transposed":
        q, v, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v, grad))
        k = k.mT.contiguous().mT
    if cell.strides == "expanded":
        grad = whole[3][:, :, :1, :1].expand(q.shape)
    return [*(x.requires_grad_() for x in (q, k, v)), grad]


def run_cells(rank: int, world: int, cells: list[Cell]) -> bytes:
    """Forward and backward of every cell on one rank."""
    found = []
    for cell in cells:
        q, k, v, grad = local(cell, rank)
        try:
            with SLOT.activate(cell.context(rank, dist.group.WORLD)):
                out, lse, *_ = attention(q, k, v, *cell.options, keep=True)
                grads = torch.autograd.grad(out, (q, k, v), grad)
        except Exception as error:
            raise AssertionError(f"rank {rank}: {cell}") from error
        found.append(oracle.Answer(out.detach(), lse.detach(), *grads))
    return pickle.dumps(found)  # plain bytes: no shared memory


def unpickled(outcome: list[bytes]) -> list[Any]:
    return [pickle.loads(part) for part in outcome]


@pytest.fixture(scope="module")
def shards(pool: Pool) -> Callable[[Cell], list[oracle.Answer]]:
    """What every rank found for a cell; all cells of one number of ranks are run at once."""
    known: dict[Cell, list[oracle.Answer]] = {}

    def find(cell: Cell) -> list[oracle.Answer]:
        if cell not in known:
            first = CELLS.index(cell) // DEFAULT * DEFAULT
            cells = [other for other in CELLS[first : first + DEFAULT] if other.world == cell.world]
            ranks = unpickled(pool.run(run_cells, cells, world=cell.world))
            known.update(zip(cells, zip(*ranks, strict=True), strict=True))
        return known[cell]

    return find


def judge(cell: Cell, shards: list[oracle.Answer]) -> None:
    """Every tensor of every rank against the oracle."""
    whole = cell.tensors()
    mask, layout = cell.mask_of(), cell.sequence.layout
    asked = oracle.PLAIN if cell.terms == "plain" else cell.asked
    answer = oracle.attention(*whole, mask, scale=cell.scale, asked=asked)
    baseline = oracle.single_device(*whole, mask, scale=cell.scale, asked=asked)
    for rank, found in enumerate(shards):
        part = layout.positions(rank)
        for name, got, truth, plain in zip(NAMES, found, answer, baseline, strict=True):
            where = f"rank {rank}: {name} of {cell}"
            half = cell.dtype in ("bf16", "fp16")
            assert got.dtype == (torch.float32 if name == "lse" and half else DTYPES[cell.dtype])
            assert_as_accurate(got, truth, plain, where=where, part=part)
        hidden = ~oracle.sighted(mask, answer.lse.shape, asked)[:, :, part]
        for name in ("out", "dq"):
            assert not getattr(found, name)[hidden].any(), f"rank {rank}: {cell}: blind rows"


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if index < DEFAULT else pytest.mark.full)
        for index, cell in enumerate(CELLS)
    ],
)
def test_cell(cell: Cell, shards: Callable[[Cell], list[oracle.Answer]]) -> None:
    judge(cell, shards(cell))


def test_cells_cover_every_pair_of_choices() -> None:
    default = CELLS[:DEFAULT]
    assert not all_pairs() - {pair for cell in default for pair in pairs_of(vars(cell))}
    assert not triples() - {tuple(vars(cell)[name] for name in TRIPLES) for cell in default}
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == EVERYTHING
    assert set(AXES["exchange"]) == {"ring", "direct", "allgather", "ulysses", "hybrid"}


def run_apart(rank: int, world: int, score: float, last: bool, cells: list[Cell]) -> bytes:
    """One query and key per rank; one key's score is `score`, the other's 0. No scale."""
    found = []
    for cell in cells:
        k = torch.tensor(score if (rank == 1) == last else 0.0, dtype=DTYPES[cell.dtype])
        q, k, v = (
            x.reshape(1, 1, 1, 1).to(k.dtype).requires_grad_()
            for x in (torch.tensor(1.0), k, torch.tensor(3.0 + rank))
        )
        with SLOT.activate(cell.context(rank, dist.group.WORLD)):
            out, lse, *_ = attention(q, k, v, False, 1.0)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        found.append(oracle.Answer(out.detach(), lse.detach(), *grads))
    return pickle.dumps(found)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("score", [200.0, -200.0])
def test_scores_far_apart_stay_finite_in_any_order(score: float, last: bool, pool: Pool) -> None:
    plain = replace(SIMPLE, mask="full", length=2, batch=1, heads=(1, 1), head_dim=1)
    cells = [
        replace(plain, exchange=exchange, dtype=dtype, kernel=kernel)
        for exchange in AXES["exchange"]
        if SCHEDULES[exchange]().block(2) == 1  # others swap heads, and merge nothing
        for dtype in DTYPES
        for kernel in AXES["kernel"]
    ]
    seen = 3.0 + int((score > 0) == last)  # the value of the key that wins
    for rank, found in enumerate(unpickled(pool.run(run_apart, score, last, cells, world=2))):
        for cell, result in zip(cells, found, strict=True):
            where = f"rank {rank}: {cell}"
            assert result.out.item() == seen, where
            assert result.lse.item() == pytest.approx(max(score, 0.0), abs=1e-30), where
            assert max(abs(result.dq.item()), abs(result.dk.item())) < 1e-30, where
            loser = rank != int((score > 0) == last)
            assert result.dv.item() == pytest.approx(0.0 if loser else 2.0, abs=1e-30), where


@pytest.mark.parametrize("world", [2, 3, 4])
def test_half_precision_error_does_not_grow_with_the_group(world: int, pool: Pool) -> None:
    cell = Cell(world, "ring", "zigzag", "causal", 64, 1, (4, 2), 16, "bf16", "sdpa", 0, "plain")
    cells = [replace(cell, exchange=exchange) for exchange in AXES["exchange"]]
    ranks = unpickled(pool.run(run_cells, cells, world=world))
    for number, each in enumerate(cells):
        judge(each, [found[number] for found in ranks])


def run_with(rank: int, world: int, cell: Cell, changes: list[tuple[int, int, float]]) -> bytes:
    """Output and gradients with q, k, v and grad of some positions changed."""
    layout = cell.sequence.layout
    whole = [x.clone() for x in cell.tensors()]
    for start, stop, value in changes:
        for x in whole:
            x[:, :, start:stop] += value
    q, k, v, grad = (layout.shard(x, rank=rank, dim=2).requires_grad_() for x in whole)
    with SLOT.activate(cell.context(rank, dist.group.WORLD)):
        out = attend(q, k, v, is_causal=cell.is_causal, scale=cell.scale, window=cell.shown.window)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    return pickle.dumps(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True)))


def whole_with(pool: Pool, cell: Cell, changes: list[tuple[int, int, float]]) -> dict[str, Tensor]:
    """The results of `run_with` over the whole sequence."""
    parts = unpickled(pool.run(run_with, cell, changes, world=cell.world))
    layout = cell.sequence.layout
    return {name: layout.unshard([part[name] for part in parts], dim=2) for name in parts[0]}


@pytest.mark.parametrize("exchange", AXES["exchange"])
@pytest.mark.parametrize("layout", ["zigzag", "dealt"])
def test_a_changed_document_changes_no_other(exchange: str, layout: str, pool: Pool) -> None:
    cell = replace(SIMPLE, world=3, exchange=exchange, layout=layout, mask="docs125", length=16)
    edges = cell.sequence.documents
    assert edges == (0, 2, 6, 16)
    before = whole_with(pool, cell, [])
    for start, stop in pairwise(edges):
        after = whole_with(pool, cell, [(start, stop, 3.0)])
        for name, old in before.items():
            changed = (
                (old != after[name]).any(dim=3).any(dim=1).any(dim=0).nonzero().flatten().tolist()
            )
            # The first token of a causal document has out = v, and no gradient of q.
            assert set(changed) <= set(range(start, stop)), f"{name}: {changed}"
            assert len(changed) >= stop - start - 1, f"{name}: {changed}"


@pytest.mark.parametrize("exchange", AXES["exchange"])
def test_padding_and_dummies_are_never_read(exchange: str, pool: Pool) -> None:
    cell = replace(SIMPLE, world=3, exchange=exchange, mask="right", length=7, batch=1, dummies=3)
    assert cell.sequence.keys == ((0, 6),)
    nan = float("nan")
    clean, dirty = whole_with(pool, cell, []), whole_with(pool, cell, [(7, 10, nan)])
    for name, old in clean.items():
        assert torch.equal(old, dirty[name]), name
    # A padded query (position 6) sees keys, but nobody sees it as a key.
    out = whole_with(pool, cell, [(6, 7, nan)])["out"]
    assert torch.equal(out[:, :, :6], clean["out"][:, :, :6])


def run_refused(rank: int, world: int) -> None:
    q, k, v, _ = local(SIMPLE, rank)
    with SLOT.activate(SIMPLE.context(rank, dist.group.WORLD)):
        out = attend(q, k, v, is_causal=True)
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        dq.sum().backward()


def test_second_derivative_is_refused(pool: Pool) -> None:
    for failure in pool.failures(run_refused, world=2):
        assert "attention_backward" in failure.message
        assert "no autograd formula" in failure.message


def run_peers_differ(rank: int, world: int) -> None:
    q, k, v, _ = local(replace(SIMPLE, world=world), rank)
    meta = dist.new_group(backend="gloo")
    context = replace(SIMPLE, world=world).context(rank, dist.group.WORLD)
    with SLOT.activate(replace(context, meta=meta, compare_calls=True)):
        attend(q, k, v, is_causal=rank != 1)


def test_calls_that_differ_between_peers_fail_on_every_rank(pool: Pool) -> None:
    for failure in pool.failures(run_peers_differ, world=3):
        assert failure.kind == "MismatchError"
        assert "attention call 0" in failure.message
        for rank, said in enumerate(("True", "False", "True")):
            assert (
                f"rank {rank} has B=2 H=4 Hk=2 D=4 torch.float64 is_causal={said} window=None"
                in (failure.message)
            )


def run_subgroups(rank: int, world: int) -> bytes:
    """Two groups of two ranks that are no neighbours, on different data."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, peer = groups[rank % 2], rank // 2
    cell = replace(SIMPLE, length=8 + 2 * (rank % 2))
    q, k, v, grad = local(cell, peer)
    with SLOT.activate(cell.context(peer, group)):
        out, lse, *_ = attention(q, k, v, *cell.options)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    return pickle.dumps(oracle.Answer(out.detach(), lse.detach(), *grads))


def test_groups_that_are_a_part_of_the_world(pool: Pool) -> None:
    found = unpickled(pool.run(run_subgroups, world=4))
    judge(SIMPLE, [found[0], found[2]])
    judge(replace(SIMPLE, length=10), [found[1], found[3]])


def run_in_flight(rank: int, world: int) -> bytes:
    """Two forwards of different batches, then their backwards, the first in another thread."""
    cells = [replace(SIMPLE, world=world), replace(SIMPLE, world=world, mask="docs35full")]
    found: list[Any] = []
    for cell in cells:
        q, k, v, grad = local(cell, rank)
        with SLOT.activate(cell.context(rank, dist.group.WORLD)):
            out, lse, *_ = attention(q, k, v, *cell.options)
        found.append([out, lse, (q, k, v), grad])
    results: list[oracle.Answer] = []

    def backward() -> None:
        for out, lse, inputs, grad in found:
            grads = torch.autograd.grad(out, inputs, grad)
            results.append(oracle.Answer(out.detach(), lse.detach(), *grads))

    thread = Thread(target=backward)
    thread.start()
    thread.join()
    return pickle.dumps(results)


def test_backward_after_the_context_in_another_thread(pool: Pool) -> None:
    ranks = unpickled(pool.run(run_in_flight, world=3))
    judge(replace(SIMPLE, world=3), [found[0] for found in ranks])
    judge(replace(SIMPLE, world=3, mask="docs35full"), [found[1] for found in ranks])


def run_cross(rank: int, world: int, causal: bool, exchange: str) -> bytes:
    """Queries and keys of two sequences of different lengths, with padded keys."""
    q, k, v, grad = cross()
    sequences = {
        "target": Sequence(layout=LAYOUTS["zigzag"](9, world), length=9, batch=2),
        "source": Sequence(
            layout=LAYOUTS["contiguous"](16, world), length=14, batch=2, keys=((0, 14), (3, 11))
        ),
    }
    layouts = [sequences[name].layout for name in ("target", "source", "source", "target")]
    q, k, v, grad = (
        layout.shard(x, rank=rank, dim=2).requires_grad_()
        for x, layout in zip((q, k, v, grad), layouts, strict=True)
    )
    context = Context(
        rank=rank,
        world=world,
        group=dist.group.WORLD,
        meta=None,
        sequences=sequences,
        exchange=exchange,
        log=CallLog(),
    )
    with SLOT.activate(context):
        out = attend(q, k, v, is_causal=causal)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    return pickle.dumps((out.detach(), *grads))


def cross() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 4, 9, 4), (2, 2, 16, 4), (2, 2, 16, 4), (2, 4, 9, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("exchange", AXES["exchange"])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_one_sequence_on_keys_of_another(
    causal: bool, exchange: str, pool: Pool
) -> None:
    ranks = unpickled(pool.run(run_cross, causal, exchange, world=3))
    answer = oracle.attention(*cross(), Mask(9, 14, causal, keys=((0, 14), (3, 11))))
    target, source = LAYOUTS["zigzag"](9, 3), LAYOUTS["contiguous"](16, 3)
    for rank, found in enumerate(ranks):
        for name, got in zip(("out", "dq", "dk", "dv"), found, strict=True):
            layout = target if name in ("out", "dq") else source
            assert_as_accurate(
                got,
                getattr(answer, name),
                None,
                where=f"rank {rank}: {name}",
                part=layout.positions(rank),
            )
