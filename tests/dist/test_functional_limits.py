"""What the public functions make of half precision, extreme scores and foreign sizes, and send."""

import math

import pytest
import torch

from lightning_cp import functional
from lightning_cp.diagnostics.trace import CollectiveRecorder
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.shards import BATCH, WIDTH, assert_close, cut, data

pytestmark = pytest.mark.dist


def run_halves(rank: int, world: int, dtype: torch.dtype) -> None:
    """Sums of many: a running sum in half precision would stall at 256 or 2048."""
    count = 6000
    batch = {"inputs_embeds": torch.ones(1, count, 1, dtype=dtype)}
    with one_group(rank, world, layout="zigzag") as context:
        shard = context.shard(batch)
        x = shard.batch["inputs_embeds"].requires_grad_()
        with context.active(shard):
            results = {
                "sum": (functional.sequence_sum(x), float(count)),
                "mean": (functional.sequence_mean(x), 1.0),
                "max": (functional.sequence_max(x), 1.0),
                "last": (functional.gather_sequence(functional.cumsum(x, dim=1))[:, -1], count),
                "softmax": (functional.sequence_sum(functional.global_softmax(x, dim=1)), 1.0),
            }
            for name, (found, expected) in results.items():
                assert found.dtype == dtype, name
                assert found.item() == pytest.approx(expected, rel=1e-2), name
            results["sum"][0].sum().backward()
            results["max"][0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    each = torch.full_like(x, world * (1 + 1 / count))
    torch.testing.assert_close(x.grad, each, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float(dtype: torch.dtype, pool: Pool) -> None:
    pool.run(run_halves, dtype, world=2)


def run_extremes(rank: int, world: int) -> None:
    """Scores at both ends of the range, -inf on whole ranks, and NaN."""
    whole = torch.zeros(3, 8, dtype=torch.float64)
    whole[0] = torch.tensor([-1e300, 1e300] * 4, dtype=torch.float64)
    whole[1, :4] = -math.inf
    whole[2] = -math.inf
    with one_group(rank, world, layout="contiguous") as context:
        shard = context.shard({"labels": whole})
        with context.active(shard):
            for method in ("packed", "three_step"):
                x = shard.batch["labels"].clone().requires_grad_()
                found = functional.global_softmax(x, method=method)
                found.square().sum().backward()
                expected = whole.softmax(-1).nan_to_num(0.0)
                part = shard.cut.sequence.layout.shard(expected, rank=rank, dim=1)
                assert_close(found, part, method)
                assert x.grad is not None
                assert x.grad.isfinite().all(), method
                assert not x.grad[2].any(), method
            x = shard.batch["labels"].clone()
            if rank == 0:
                x[0, 0] = math.nan
            found = functional.sequence_max(x)
            assert found[0].isnan()
            assert found[1:].tolist() == [0.0, -math.inf]


def test_extreme_scores(pool: Pool) -> None:
    pool.run(run_extremes, world=2)
    pool.run(run_extremes, world=3)


def run_traffic(rank: int, world: int) -> None:
    """What travels: sums of one number per span or row, never a whole sequence but in a gather."""
    with one_group(rank, world, layout="zigzag") as context:
        shard, _, _ = cut(context, data(24))
        x = shard.batch["inputs_embeds"]
        row = BATCH * WIDTH * 8
        spans = sum(len(spans) for spans in shard.cut.sequence.layout.spans)
        calls = {
            "sequence_sum": (lambda: functional.sequence_sum(x), {"allreduce_": row + 8}),
            "sequence_mean": (
                lambda: functional.sequence_mean(x, mask=x),
                {"allreduce_": 2 * row},
            ),
            "sequence_max": (lambda: functional.sequence_max(x), {"allreduce_": 2 * row}),
            "cumsum": (lambda: functional.cumsum(x, dim=1), {"allreduce_": spans * row}),
            "packed": (lambda: functional.global_softmax(x, dim=1), {"send": 2 * row}),
            "three_step": (
                lambda: functional.global_softmax(x, dim=1, method="three_step"),
                {"allreduce_": 3 * row},
            ),
            "gather": (lambda: functional.gather_sequence(x), {"send": 12 * row}),
        }
        with context.active(shard):
            for name, (call, expected) in calls.items():
                with CollectiveRecorder() as recorder:
                    call()
                for kind, size in expected.items():
                    assert recorder.total(kind) == size, f"{name}: {recorder.calls}"


def test_what_travels(pool: Pool) -> None:
    pool.run(run_traffic, world=2)


def run_refused(rank: int, world: int) -> list[str]:
    whole = data(10)
    found = []
    with one_group(rank, world, layout="contiguous") as context:
        shard = context.shard({"inputs_embeds": whole.x})
        short = shard.batch["inputs_embeds"][:, :3]
        with context.active(shard):
            for call in (
                lambda: functional.positions(3),
                lambda: functional.shift_labels(short[..., 0].long()),
                lambda: functional.sequence_sum(short),
                lambda: functional.sequence_mean(short),
                lambda: functional.sequence_max(short),
                lambda: functional.gather_sequence(short),
                lambda: functional.scatter_sequence(short),
                lambda: functional.cumsum(short, dim=1),
                lambda: functional.global_softmax(short, dim=1),
            ):
                try:
                    call()
                except functional.RefusedError as error:
                    found.append(str(error))
    return found


def test_sizes_that_are_nobodys_share_are_refused(pool: Pool) -> None:
    for found in pool.run(run_refused, world=2):
        assert len(found) == 9
        for message in found:
            assert message.startswith("3 tokens are no declared sequence's ")
            assert "functional.local()" in message
