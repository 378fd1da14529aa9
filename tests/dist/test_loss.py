"""Swapped losses on shards equal the losses of one process that sees the whole batch."""

import pickle

import pytest
import torch

from lightning_cp.layout import LAYOUTS
from tests._harness.group import one_group
from tests._harness.losses import BATCH, LABELS, Case, Result, gradients
from tests._harness.pool import Pool
from tests._harness.tolerance import assert_as_accurate

pytestmark = pytest.mark.dist

CASES = (
    *(Case(labels, length, layout=layout) for labels in LABELS for length in (1, 7, 8)
      for layout in ("contiguous", "zigzag")),
    *(Case(labels, reduction=reduction, loss=loss, shape=shape, weighted=weighted)
      for labels, weighted in (("uneven", False), ("dense", True), ("none", True))
      for reduction in ("mean", "sum", "none") for loss in ("cross_entropy", "nll_loss")
      for shape in ("NC", "BCS")),
    *(Case(labels, 7, smoothing=0.1, weighted=weighted, reduction=reduction, layout="zigzag")
      for labels in ("uneven", "none") for weighted in (False, True)
      for reduction in ("mean", "sum")),
    *(Case(soft=True, shape="BCS", weighted=weighted, reduction=reduction, smoothing=smoothing)
      for weighted in (False, True) for reduction, smoothing in (("none", 0.0), ("none", 0.2),
                                                                 ("mean", 0.2), ("sum", 0.2))),
    *(Case("uneven", smoothing=0.1, weighted=weighted, reduction="none")
      for weighted in (False, True)),
    *(Case("prompt", 7, loss=loss, ignore=2, reduction=reduction, layout="zigzag")
      for loss in ("cross_entropy", "nll_loss") for reduction in ("mean", "sum", "none")),
    *(Case(length=length, soft=True, shape=shape, weighted=weighted, reduction=reduction)
      for length in (2, 8) for shape in ("NC", "BCS") for weighted in (False, True)
      for reduction in ("mean", "sum")),
    *(Case(labels, ignore=ignore, weighted=True) for labels in ("uneven", "prompt")
      for ignore in (-1, 4)),
    *(Case(labels, 7, dtype=dtype, reduction=reduction) for labels in ("dense", "prompt")
      for dtype in (torch.float32, torch.bfloat16, torch.float16) for reduction in ("mean", "sum")),
)  # fmt: skip
"""Every case runs on 1, 2 and 3 ranks."""


def run_cases(rank: int, world: int, cases: list[Case]) -> bytes:
    found = []
    for layout in ("contiguous", "zigzag"):
        with one_group(rank, world, layout=layout, sequence_dims={"soft": 1}) as context:
            for case in cases:
                if case.layout != layout:
                    continue
                model = case.model()
                shard = context.shard(case.batch())
                with context.active(shard):
                    result = gradients(case.value(model, shard.batch), model)
                found.append((case, result))
    return pickle.dumps(found)


@pytest.fixture(scope="module")
def results(pool: Pool) -> dict[int, list[dict[Case, Result]]]:
    """For 1, 2 and 3 ranks what every rank found in every case."""
    found = {world: pool.run(run_cases, list(CASES), world=world) for world in (1, 2, 3)}
    return {world: [dict(pickle.loads(x)) for x in ranks] for world, ranks in found.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, world: int, results: dict[int, list[dict[Case, Result]]]) -> None:
    ranks = [found[case] for found in results[world]]
    model = case.model()
    plain = gradients(case.value(model, case.batch()), model)
    precise = case.model().double()
    batch = {k: x.double() if x.is_floating_point() else x for k, x in case.batch().items()}
    double = Case(**{**vars(case), "dtype": torch.float64})
    exact = gradients(double.value(precise, batch), precise)
    if exact.loss.isnan().any():  # an intended deviation: nothing to learn is no error
        exact = Result(*(torch.zeros_like(x) for x in exact))
        plain = Result(*(torch.zeros_like(x) for x in plain))
    for rank, found in enumerate(ranks):
        assert found.loss.dtype == case.dtype
        if case.reduction != "none":
            where = f"rank {rank} of {world}: loss of {case}"
            assert_as_accurate(found.loss, exact.loss, plain.loss, where=where)
            assert torch.equal(found.loss, ranks[0].loss), "the same scalar on every rank"
    for name in ("weight", "bias"):
        grads = [getattr(found, name) for found in ranks]
        mean = torch.stack(grads).double().mean(0)
        if case.reduction == "none":  # every rank summed its own tokens, and nobody else's
            mean *= world
        mean = mean.to(case.dtype)
        where = f"mean over {world} ranks of the gradient of {name} of {case}"
        assert_as_accurate(mean, getattr(exact, name), getattr(plain, name), where=where)


@pytest.mark.parametrize("case", [c for c in CASES if c.reduction == "none"], ids=str)
def test_without_reduction_the_loss_is_one_value_per_local_token(
    case: Case, results: dict[int, list[dict[Case, Result]]]
) -> None:
    whole = case.value(case.model(), case.batch()).detach().reshape(BATCH, case.length)
    for world in (1, 2, 3):
        shards = [found[case].loss.reshape(BATCH, -1) for found in results[world]]
        found = LAYOUTS[case.layout](case.length, world).unshard(shards, dim=1)
        torch.testing.assert_close(found, whole, rtol=1e-14, atol=0)
