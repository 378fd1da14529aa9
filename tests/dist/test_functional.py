"""The public functions on shards equal plain torch on the whole sequence, gradients included."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_cp import functional
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.shards import BATCH, IGNORED, LENGTHS, WAYS, Data, assert_close, cut, data

pytestmark = pytest.mark.dist

PLACES = [(length, *way) for length in LENGTHS for way in WAYS]


def plain_mean(x: Tensor, weights: Tensor) -> Tensor:
    total = (x * weights[..., None]).sum(1)
    weight = weights.sum(1)[:, None].expand_as(total)
    return torch.where(weight == 0, 0, total / torch.where(weight == 0, 1, weight))


def plain_softmax(x: Tensor, mask: Tensor) -> Tensor:
    hidden = x.masked_fill(~mask[..., None], -math.inf)
    return hidden.softmax(1).nan_to_num(0.0)


class Function(NamedTuple):
    """A function on shards, the same by plain torch on one device; whether its result is cut."""

    ours: Callable[[Data], Tensor]
    plain: Callable[[Data], Tensor]
    sharded: bool = False


FUNCTIONS = {
    "sum": Function(lambda d: functional.sequence_sum(d.x), lambda d: d.x.sum(1)),
    "sum-masked": Function(
        lambda d: functional.sequence_sum(d.x, mask=d.mask, keepdim=True),
        lambda d: (d.x * d.mask[..., None]).sum(1, keepdim=True),
    ),
    "sum-weighted-last-dim": Function(
        lambda d: functional.sequence_sum(d.x[..., 0], dim=-1, mask=d.weights),
        lambda d: (d.x[..., 0] * d.weights).sum(1),
    ),
    "sum-time-major": Function(
        lambda d: functional.sequence_sum(d.x.transpose(0, 1), dim=0), lambda d: d.x.sum(1)
    ),
    "mean": Function(lambda d: functional.sequence_mean(d.x), lambda d: d.x.mean(1)),
    "mean-masked": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.mask, keepdim=True),
        lambda d: plain_mean(d.x, d.mask.double())[:, None],
    ),
    "mean-weighted": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.weights[..., None]),
        lambda d: plain_mean(d.x, d.weights),
    ),
    "mean-of-one-weight-per-token": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.weights[0]),
        lambda d: plain_mean(d.x, d.weights[:1].expand(BATCH, -1)),
    ),
    "max": Function(lambda d: functional.sequence_max(d.x), lambda d: d.x.amax(1)),
    "max-masked": Function(
        lambda d: functional.sequence_max(d.x, mask=d.mask, keepdim=True)[:1],
        lambda d: torch.where(d.mask[..., None], d.x, -math.inf).amax(1, keepdim=True)[:1],
    ),
    "gather": Function(lambda d: functional.gather_sequence(d.x), lambda d: d.x.clone()),
    "cumsum": Function(
        lambda d: functional.cumsum(d.x, dim=1), lambda d: d.x.cumsum(1), sharded=True
    ),
    "cumsum-time-major": Function(
        lambda d: functional.cumsum(d.x.transpose(0, 1), dim=0).transpose(0, 1),
        lambda d: d.x.cumsum(1),
        sharded=True,
    ),
    "softmax": Function(
        lambda d: functional.global_softmax(d.x * 300, dim=1),
        lambda d: (d.x * 300).softmax(1),
        sharded=True,
    ),
    "softmax-three-step": Function(
        lambda d: functional.global_softmax(d.x * 300, dim=1, method="three_step"),
        lambda d: (d.x * 300).softmax(1),
        sharded=True,
    ),
    "softmax-masked": Function(
        lambda d: functional.global_softmax(d.x, dim=1, mask=d.mask),
        lambda d: plain_softmax(d.x, d.mask),
        sharded=True,
    ),
    "softmax-masked-three-step": Function(
        lambda d: functional.global_softmax(d.x, dim=-2, mask=d.mask, method="three_step"),
        lambda d: plain_softmax(d.x, d.mask),
        sharded=True,
    ),
}


def pattern(x: Tensor) -> Tensor:
    """Other weights for every element, so that no mistake cancels out."""
    return torch.arange(1, x.numel() + 1, dtype=x.dtype).cos().view_as(x)


class Expected(NamedTuple):
    """What plain torch finds on one device, and the gradient of its weighed sum."""

    value: Tensor
    weighing: Tensor
    grad: Tensor


def reference(function: Function, whole: Data, factor: float) -> Expected:
    x = whole.x.clone().requires_grad_()
    found = function.plain(whole._replace(x=x))
    value = torch.where(found.isfinite(), found, 0)
    weighing = pattern(value)
    (value * weighing).sum().mul(factor).backward()
    assert x.grad is not None
    return Expected(value.detach(), weighing, x.grad)


def run_functions(rank: int, world: int, layout: str, length: int) -> None:
    """Ranks weigh their losses differently; a rank's gradients come from all ranks' losses."""
    whole = data(length)
    everyone = world * (world + 1) / 2
    references = {
        name: reference(function, whole, 1.0 if function.sharded else everyone)
        for name, function in FUNCTIONS.items()
    }
    with one_group(rank, world, layout=layout) as context:
        shard, part, places = cut(context, whole)
        kept = shard.cut.sequence.real(rank)
        with context.active(shard):
            for name, function in FUNCTIONS.items():
                value, weighing, grad = references[name]
                local = part.x.clone().requires_grad_()
                found = function.ours(part._replace(x=local))
                found = torch.where(found.isfinite(), found, 0)
                if function.sharded:
                    assert not found[:, ~kept].any(), f"{name}: dummies are not 0"
                    found, value = found[:, kept], value[:, places]
                    (found * weighing[:, places]).sum().backward()
                else:
                    ((rank + 1) * (found * weighing).sum()).backward()
                assert_close(found.detach(), value, name)
                assert local.grad is not None
                assert not local.grad[:, ~kept].any(), f"{name}: dummies have a gradient"
                assert_close(local.grad[:, kept], grad[:, places], f"gradient of {name}")


@pytest.mark.parametrize(("length", "world", "layout"), PLACES)
def test_values_and_gradients(world: int, layout: str, length: int, pool: Pool) -> None:
    pool.run(run_functions, layout, length, world=world)


def run_integers(rank: int, world: int, layout: str, length: int) -> None:
    """Results that must be equal bit by bit."""
    whole = data(length)
    shifted = torch.cat([whole.labels[:, 1:], torch.full((BATCH, 1), IGNORED)], 1)
    originals = [(x, x.cumsum(1)) for x in (whole.labels, whole.mask, whole.labels.int())]
    numbers = torch.arange(5)
    with one_group(rank, world, layout=layout) as context:
        shard, part, places = cut(context, whole)
        kept = shard.cut.sequence.real(rank)
        with context.active(shard):
            labels = part.labels
            size = labels.shape[1]
            assert torch.equal(functional.positions(size)[kept], places)
            found = functional.shift_labels(labels)
            assert torch.equal(found[:, kept], shifted[:, places])
            assert (found[:, ~kept] == IGNORED).all()
            found = functional.shift_labels(labels.T.int(), dim=0, ignore_index=-1)
            target = shifted.masked_fill(shifted == IGNORED, -1).T.int()
            assert torch.equal(found[kept], target[places])
            for original, cumulated in originals:
                values = part.mask if original.dtype == torch.bool else labels.to(original.dtype)
                assert torch.equal(functional.gather_sequence(values), original)
                scattered = functional.scatter_sequence(original)
                assert torch.equal(scattered[:, kept], values[:, kept])
                assert not scattered[:, ~kept].any()
                assert torch.equal(functional.sequence_sum(values), original.sum(1))
                assert torch.equal(functional.sequence_max(values), original.amax(1))
                running = functional.cumsum(values, dim=1)
                assert torch.equal(running[:, kept], cumulated[:, places])
                right = functional.sequence_mean(values == 1)
                torch.testing.assert_close(right, (original == 1).float().mean(1))
            with functional.local():
                assert torch.equal(functional.gather_sequence(labels), labels)
                assert torch.equal(functional.scatter_sequence(labels), labels)
                assert torch.equal(functional.sequence_sum(labels), labels.sum(1))
                assert torch.equal(functional.positions(5), numbers)


@pytest.mark.parametrize(("length", "world", "layout"), PLACES)
def test_integers(world: int, layout: str, length: int, pool: Pool) -> None:
    pool.run(run_integers, layout, length, world=world)
