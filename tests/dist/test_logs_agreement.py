"""What ranks logged in a step becomes one value: which are kept, reduced, refused or said."""

from typing import Any

import pytest
import torch

from lightning_cp.errors import ContextParallelWarning, RefusedError
from lightning_cp.logs import Agreement, Group, Logged, combined

pytestmark = pytest.mark.dist


def agree(rank: int, world: int, steps: list[list[list[Logged]]], weights: list[float]) -> Any:
    """Reduce what each step logs on each rank; a task of the pool."""
    said: list[str] = []
    group = torch.distributed.group.WORLD
    agreement = Agreement(group=group, rank=rank, world=world, say=said.append)
    found = [agreement.reduce(step[rank], weights[rank]) for step in steps]
    return [[tuple(x) for x in step] for step in found], said


def test_what_differs_is_reduced_and_said_once(pool):
    nan = float("nan")
    step = [
        [Logged("kept", 2.0), Logged("mean", 1.0), Logged("sum", 1, "sum"), Logged("nan", nan)],
        [Logged("nan", nan), Logged("sum", 5, "sum"), Logged("mean", 4.0), Logged("kept", 2.0)],
        [Logged("mean", nan), Logged("kept", 2.0), Logged("sum", 0, "sum"), Logged("nan", nan)],
    ]
    (found, said), *others = pool.run(agree, [step, step], [1.0, 2.0, 0.0], world=3)
    assert found == [[(None, None), (3.0, None), (6.0, None), (None, None)]] * 2
    assert len(said) == 2
    assert "'mean'" in said[0]
    assert "weighted by the tokens" in said[0]
    assert "'sum' differs" in said[1]
    assert all(set(other[0][0]) == set(found[0]) for other in others)


def test_values_equal_but_for_rounding_are_made_identical(pool):
    step = [[Logged("a", 1.0, "sum")], [Logged("a", 1.0 + 1e-9, "sum")]]
    for found, said in pool.run(agree, [step], [1.0, 1.0], world=2):
        assert found == [[(1.0, None)]]
        assert len(said) == 1
        assert "'a' is a sum, and equal" in said[0]


def late_sum(rank: int, world: int) -> Any:
    values = [[[Logged("n", x, "sum")], [Logged("n", y, "sum")]] for x, y in SUMS]
    with pytest.warns(ContextParallelWarning, match="'n' was equal .*sequence_sum"):
        return agree(rank, world, values, [1.0, 1.0])


SUMS = [(3, 3), (3, 2), (4, 4)]


def test_a_sum_that_was_equal_by_chance_is_warned_of_and_summed_ever_after(pool):
    for found, _ in pool.run(late_sum, world=2):
        assert found == [[(None, None)], [(5.0, None)], [(8.0, None)]]


def test_a_mean_without_weights_is_refused_on_every_rank(pool):
    step = [[Logged("a", 1.0)], [Logged("a", 2.0)]]
    for failure in pool.failures(agree, [step], [float("nan")] * 2, world=2):
        assert failure.kind == RefusedError.__name__
        assert "'a'" in failure.message
        assert "loss_mask" in failure.message


@pytest.mark.parametrize(
    ("values", "weights", "counts", "kind", "expected"),
    [
        ([1.0, 4.0], [3.0, 1.0], None, "mean", 1.75),
        ([1.0, 4.0], [3.0, 1.0], [1.0, 3.0], "mean", 3.25),
        ([1.0, 4.0], [3.0, 1.0], [2.0, 2.0], "mean", 1.75),
        ([1.0, 4.0], [0.0, 0.0], None, "mean", 2.5),
        ([1.0, float("nan")], [3.0, 0.0], None, "mean", 1.0),
        ([1.0, float("inf")], [3.0, 0.0], None, "mean", 1.0),
        ([1.0, float("nan")], [3.0, 1.0], None, "mean", float("nan")),
        ([1.0, float("nan")], [3.0, 0.0], None, "max", 1.0),
        ([1.0, float("inf")], [3.0, 1.0], None, "sum", float("inf")),
        ([2.0, 5.0, 3.0], [1.0, 1.0, 1.0], None, "min", 2.0),
        ([2.0, 5.0, 3.0], [1.0, 1.0, 1.0], None, "max", 5.0),
    ],
)
def test_combined(values, weights, counts, kind, expected):
    group = Group(values, weights, counts or [float("nan")] * len(values), False)
    assert combined(group, kind) == pytest.approx(expected, nan_ok=True)
