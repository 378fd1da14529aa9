"""Models that read two sequences, unchanged, on parts of both equal themselves on whole rows."""

import pickle
from functools import cache
from typing import NamedTuple

import pytest
from torch import Tensor, nn

from tests._harness import pairs
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.hf import in_double
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

TOLERANCE = 1e-11
CASES = {
    "longer": (19, 7, False),
    "padded": (13, 8, True),
    "shorter": (5, 11, True),
    "tiny": (9, 1, False),
    "alike": (12, 12, True),
}
"""Lengths of source and target, and whether rows are padded."""


class Found(NamedTuple):
    """What a step gave: loss, outputs of whole rows, gradients."""

    loss: float
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_cases(rank: int, world: int, name: str) -> bytes:
    found, pair = {}, pairs.PAIRS[name]
    with one_group(rank, world, sequence_dims=dict(pair.dims), predict_gather="all") as parallel:
        for title, case in CASES.items():
            model = pair.make()
            with in_double():
                shard = parallel.shard(pair.batch(*case), module=model, stage=title)
                with parallel.active(shard):
                    step = pair.call(model, shard.batch)
                    step.loss.backward()
                parallel.check(shard, step.loss)
            assert shard.context.log.attention == pair.attention
            outputs = dict(step.outputs)
            outputs = parallel.gather(outputs, shard) if world > 1 else outputs
            found[title] = Found(step.loss.item(), outputs, grads_of(model))
    return pickle.dumps(found)


@cache
def alone(name: str, title: str) -> Found:
    pair = pairs.PAIRS[name]
    model = pair.make()
    with in_double():
        step = pair.call(model, pair.batch(*CASES[title]))
        step.loss.backward()
    outputs = {name: x.detach() for name, x in step.outputs.items()}
    return Found(step.loss.item(), outputs, grads_of(model))


def assert_equal(found: list[Found], expected: Found) -> None:
    largest = max(grad.abs().max().item() for grad in expected.grads.values())
    for rank, one in enumerate(found):
        assert one.loss == pytest.approx(expected.loss, rel=TOLERANCE), f"loss of rank {rank}"
        for name, output in expected.outputs.items():
            assert one.outputs[name].shape == output.shape, name
    for key, grad in expected.grads.items():
        mean = sum(one.grads[key] for one in found) / len(found)
        off = (mean - grad).abs().max().item() / largest
        assert off < TOLERANCE, f"gradient of {key} is off by {off}"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", pairs.PAIRS)
def test_pairs(pool: Pool, name: str, world: int) -> None:
    ranks = pool.run(run_cases, name, world=world, timeout=60)
    found = [pickle.loads(x) for x in ranks]
    for title in CASES:
        try:
            assert_equal([one[title] for one in found], alone(name, title))
        except AssertionError as error:
            raise AssertionError(f"{name}, {title}: {error}") from error
