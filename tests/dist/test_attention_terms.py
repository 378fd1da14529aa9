"""What scores are made of, over a group of ranks: gradients, and the functions that hide keys."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_cp.attention import attention
from lightning_cp.context import SLOT
from lightning_cp.plan import Direct
from tests._harness import oracle
from tests._harness.cases import Cell
from tests._harness.pool import Pool
from tests._harness.tolerance import assert_as_accurate
from tests.dist.test_attention import SIMPLE, local, unpickled

pytestmark = pytest.mark.dist

LEARNED = [
    replace(SIMPLE, world=3, exchange="direct", mask=mask, terms=terms, length=21)
    for mask, terms in (
        ("causal", "sinks"),
        ("docs35full", "alibi"),
        ("leftwindow", "bias"),
        ("prefixwindow", "all"),
    )
]


def run_learned(rank: int, world: int, cells: list[Cell]) -> bytes:
    """The gradients of what scores are made of, on one rank."""
    found = []
    for cell in cells:
        q, k, v, grad = local(cell, rank)
        asked = cell.asked.learning(lambda x: x.requires_grad_())
        context = replace(cell.context(rank, dist.group.WORLD), exchange=Direct(head_chunks=2))
        with SLOT.activate(context):
            options = cell.options[:6]
            out, *_ = attention(q, k, v, *options, *asked.options())
            grads = torch.autograd.grad(out, list(asked.learned.values()), grad)
        found.append(dict(zip(asked.learned, grads, strict=True)))
    return pickle.dumps(found)


def test_what_scores_are_made_of_learns(pool: Pool) -> None:
    """Every rank has the part of its own queries; together they are the whole gradient."""
    ranks = unpickled(pool.run(run_learned, LEARNED, world=3))
    for number, cell in enumerate(LEARNED):
        truth = oracle.learned(*cell.tensors(), cell.mask_of(), scale=cell.scale, asked=cell.asked)
        for name, expected in truth.items():
            total = sum(found[number][name] for found in ranks)
            assert_as_accurate(total, expected, None, where=f"{name} of {cell}")
