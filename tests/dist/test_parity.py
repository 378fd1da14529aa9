"""Whole Trainer runs equal those of the plain Trainer with one device per virtual device."""

import numpy as np
import pytest
import torch.distributed as dist

from lightning_cp.plan import Direct, Ulysses
from tests._harness.grid import named, rotated
from tests._harness.models import Case, evaluate, fit, furthest, seeded
from tests._harness.rows import TOGETHER, TOLERANCE, TRAINING, Row, check, trainer

pytestmark = pytest.mark.dist

GRID = [
    *(
        Row(
            f"{exchange}-{layout}-W{world}",
            Case(),
            {"exchange": exchange, "layout": layout},
            1,
            world,
        )
        for exchange in ("ring", "direct", "allgather")
        for layout in ("contiguous", "zigzag")
        for world in (2, 3)
    ),
    Row("ulysses-zigzag-W2", Case(), {"exchange": "ulysses", "layout": "zigzag"}, 1, 2),
    Row(
        "ulysses-contiguous-W3",
        Case(heads=6, kv_heads=2),
        {"exchange": "ulysses", "layout": "contiguous"},
        1,
        3,
    ),
    Row("hybrid-zigzag-W4", Case(), {"exchange": "hybrid", "layout": "zigzag"}, 1, 4),
    Row("dp2-cp2-ulysses", Case(samples=12), {"exchange": Ulysses(head_chunks=1)}, 2, 2),
    Row("dp2-cp2-ring-zigzag", Case(samples=12), {}, 2, 2),
    Row(
        "dp2-cp2-allgather-contiguous",
        Case(samples=12),
        {"exchange": "allgather", "layout": "contiguous"},
        2,
        2,
    ),
    Row("dp2-cp1", Case(samples=12), {}, 2, 1),
]

ROWS = [
    *TRAINING,
    *TOGETHER,
    Row("momentum", Case(momentum=0.9), {}),
    Row("accumulation", Case(samples=12, trainer=trainer(accumulate_grad_batches=2)), {}),
    Row("clip-norm", Case(trainer=trainer(gradient_clip_val=0.1)), {}),
    Row("two-epochs", Case(epochs=2, momentum=0.9), {}),
    Row("shuffle", Case(shuffle=True, epochs=2), {}),
    Row(
        "one-backward-for-two-paddings",
        Case(padding=("left", "right"), samples=8, recomputed="blocks", optimisation="delayed"),
        {},
    ),
    Row("shuffle-on-four-ranks", Case(samples=12, shuffle=True, epochs=2), {}, 2, 2),
    Row("grouped-heads", Case(kv_heads=2), {}, cp=3),
    Row("groups-of-heads", Case(kv_heads=2), {"exchange": Direct(head_chunks=2)}, cp=3),
    Row("no-overlap", Case(), {"overlap": False}, cp=3),
]

BATCHES = [
    Row("tuple", Case(kind="tuple", positions="functional"), {"sequence_dims": {"0": 1, "1": 1}}),
    Row("tensor", Case(kind="tensor", positions="functional"), {}, cp=3),
    Row("tensor-with-dummies", Case(kind="tensor", positions="functional", lengths=(3,)), {}, cp=3),
    Row("positions-in-batch", Case(offset=5), {}),
    Row("lengths-differ", Case(lengths=(24, 7, 10)), {}, cp=3),
    Row("filled-up", Case(lengths=(21, 13)), {"pad_to_multiple_of": 8}),
    # Sizes that can be taken for one another: rows, heads, channels of a head and local tokens.
    Row("all-sizes-equal-2", Case(lengths=(8,), batch=4, samples=12), {}),
    Row(
        "all-sizes-equal-3",
        Case(lengths=(12,), batch=4, samples=12),
        {"layout": "contiguous"},
        cp=3,
    ),
    Row(
        "labels-3-and-1",
        Case(lengths=(8,), batch=1, samples=3, valid=(0, 1, 2, 7)),
        {"layout": "contiguous"},
    ),
    Row("padding-left", Case(padding=("left",)), {}),
    Row("padding-right", Case(padding=("right",)), {}, cp=3),
    Row("padding-both", Case(padding=("left", "right")), {"layout": "contiguous"}, cp=3),
    Row("padding-allgather", Case(padding=("right", "left")), {"exchange": "allgather"}),
    Row("padding-recomputed", Case(padding=("left", "right"), recomputed="blocks"), {}),
]


def of_size(size: int, layout: str) -> Row:
    # Two ids may be taken for a sequence of two.
    options = {"layout": layout, "sequence_dims": {"id": None}}
    return Row(f"S{size}-{layout}", Case(lengths=(size,)), options, cp=3)


def labelled_in_front(layout: str, world: int) -> Row:
    options = {"layout": layout}
    return Row(f"labels-on-one-rank-{layout}-W{world}", Case(valid="front"), options, cp=world)


@pytest.mark.parametrize(
    ("row", "precision"), rotated(GRID, [(name,) for name in TOLERANCE]), ids=named
)
def test_grid(row, precision, pool, plain):
    check(row, pool, plain, precision)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_training(row, pool, plain):
    check(row, pool, plain, "64-true")


@pytest.mark.parametrize("row", BATCHES, ids=named)
def test_batches(row, pool, plain):
    check(row, pool, plain, "64-true")


@pytest.mark.parametrize(("size", "layout"), rotated((1, 2, 7, 10), [("zigzag",), ("contiguous",)]))
def test_short_rows(size, layout, pool, plain):
    check(of_size(size, layout), pool, plain, "64-true")


@pytest.mark.parametrize(("layout", "world"), rotated(("contiguous", "zigzag"), [(2,), (3,)]))
def test_labels_on_one_rank(layout, world, pool, plain):
    check(labelled_in_front(layout, world), pool, plain, "64-true")


@pytest.mark.parametrize("precision", TOLERANCE)
def test_references_move(precision, plain):
    """Equal parameters say something: three steps change each of them, and differ from others."""
    case = Case(precision=precision)
    start = dict(seeded(case).named_parameters())
    for name, value in plain(case)[0].parameters.items():
        assert np.abs(value - start[name].detach().numpy()).max() > 1e-3, name
    clipped = plain(Case(precision=precision, trainer=trainer(gradient_clip_val=0.1)))[0]
    assert furthest(clipped, plain(case)[0])["parameters"] > 1e-3


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(momentum=0.9, shuffle=True, epochs=2, recomputed="blocks"),
        Case(samples=12, trainer=trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)),
        Case(optimisation="manual", lengths=(1, 7)),
    ],
    ids=["default", "two-epochs", "accumulation", "manual"],
)
def test_one_device_is_the_plain_trainer(case, pool, plain):
    (found,), (expected,) = pool.run(fit, case, {}, world=1), plain(case)
    assert not found.swapped
    assert (found.ids, found.counts) == (expected.ids, expected.counts)
    assert (found.step_losses, found.metrics) == (expected.step_losses, expected.metrics)
    for name, value in expected.parameters.items():
        assert np.array_equal(found.parameters[name], value), name


@pytest.mark.parametrize("world", [2, 3])
def test_batch_without_labels_has_loss_zero(world, pool, plain):
    """The one deviation: the plain Trainer logs NaN; the parameters are the same."""
    case = Case(valid="empty", precision="64-true")
    (expected,) = plain(case)
    assert np.isnan(expected.step_losses).tolist() == [False, True, False]
    assert np.isnan(expected.metrics["val_loss"])
    for found in pool.run(fit, case, {}, world=world):
        assert found.step_losses[1] == 0
        assert np.isfinite(list(found.metrics.values())).all()
        assert np.allclose(
            [found.step_losses[0], found.step_losses[2]],
            [expected.step_losses[0], expected.step_losses[2]],
            rtol=1e-12,
        )
        assert furthest(found, expected)["parameters"] <= 1e-12


@pytest.mark.parametrize("options", [{}, {"layout": "contiguous", "exchange": "allgather"}])
def test_bf16_mixed_is_close(options, pool, plain):
    case = Case(precision="bf16-mixed")
    (expected,) = plain(case)
    for found in pool.run(fit, case, options, world=2):
        distances = furthest(found, expected)
        assert max(distances.values()) <= 5e-3, distances
    assert furthest(expected, plain(Case())[0])["parameters"] > 1e-5


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_alone(stage, pool):
    case = Case(lengths=(24, 7))
    (expected,) = pool.run(evaluate, case, None, stage, world=1)
    assert list(expected) == ["val_loss"]
    for found in pool.run(evaluate, case, {}, stage, world=3):
        assert found == pytest.approx(expected, rel=1e-6)


def _groups_after_fits(rank: int, world: int) -> list[int]:
    counts = [len(dist.distributed_c10d._world.pg_map)]
    for _ in range(2):
        fit(rank, world, Case(), {})
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_groups_are_given_back(pool):
    for counts in pool.run(_groups_after_fits, world=2):
        assert len(set(counts)) == 1, counts
