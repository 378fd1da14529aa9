"""Swapped losses among other things: replicated inputs, dummies, what is refused, no context."""

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.api import Shard
from lightning_cp.context import SLOT
from lightning_cp.loss import group_mean
from tests._harness.group import one_group
from tests._harness.losses import BATCH, CLASSES, IGNORED, WIDTH, Case, gradients
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist


def run_replicated(rank: int, world: int) -> bytes:
    """A head on inputs that are equal on all ranks, beside a sharded loss in the same step."""
    case = Case(length=8)
    with one_group(rank, world, layout="zigzag") as context:
        shard = context.shard(case.batch())
        found = []
        for also in (False, True):
            model = case.model()
            head = nn.Linear(2, 2, dtype=torch.float64)
            nn.init.constant_(head.weight, 0.5)
            nn.init.constant_(head.bias, 0.1)
            with context.active(shard):
                inputs = torch.arange(6, dtype=torch.float64).reshape(3, 2)
                labels = torch.tensor([0, 1, IGNORED])
                loss = F.cross_entropy(head(inputs), labels)
                total = loss + 2 * case.value(model, shard.batch) if also else loss
                total.backward()
            assert head.weight.grad is not None
            found.append((loss.detach(), total.detach(), head.weight.grad, model.weight.grad))
    return pickle.dumps(found)


def test_a_loss_of_replicated_inputs_is_unchanged_beside_a_sharded_one(pool: Pool) -> None:
    case = Case(length=8)
    model, head = case.model(), nn.Linear(2, 2, dtype=torch.float64)
    nn.init.constant_(head.weight, 0.5)
    nn.init.constant_(head.bias, 0.1)
    inputs = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    loss = F.cross_entropy(head(inputs), torch.tensor([0, 1, IGNORED]))
    total = loss + 2 * case.value(model, case.batch())
    total.backward()
    assert head.weight.grad is not None
    assert model.weight.grad is not None
    ranks = [pickle.loads(x) for x in pool.run(run_replicated, world=3)]
    for rank, found in enumerate(ranks):
        for number, expected in enumerate((loss, total)):
            close = torch.allclose(found[number][number], expected, rtol=1e-12)
            assert close, f"rank {rank}: {found[number]}"
            close = torch.allclose(found[number][2], head.weight.grad, rtol=1e-12)
            assert close, f"rank {rank}: {found[number]}"
    mean = sum(found[1][3] for found in ranks) / 3
    assert torch.allclose(mean, model.weight.grad, rtol=1e-12, atol=1e-14)


def run_large(rank: int, world: int, dtype: torch.dtype) -> bytes:
    """4096 losses of 40: their sum overflows fp16, and bf16 cannot count so far."""
    count = 4096
    batch = {"inputs_embeds": torch.zeros(1, count, 2), "labels": torch.zeros(1, count).long()}
    batch["inputs_embeds"][:, :, 1] = 40.0
    with one_group(rank, world) as context:
        shard = context.shard(batch)
        logits = shard.batch["inputs_embeds"].to(dtype).requires_grad_()
        with context.active(shard):
            loss = F.cross_entropy(logits.flatten(0, 1), shard.batch["labels"].flatten())
            loss.backward()
    assert logits.grad is not None
    return pickle.dumps((loss.detach(), logits.grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mean_in_half_precision_neither_overflows_nor_stalls(
    dtype: torch.dtype, pool: Pool
) -> None:
    for loss, grad in map(pickle.loads, pool.run(run_large, dtype, world=2)):
        assert loss.dtype == grad.dtype == dtype
        assert loss.item() == 40.0
        # Mean over 2 ranks of local gradients: each is twice its share of 1 / 4096.
        assert torch.allclose(grad[0, :, 1], torch.tensor(2 / 4096, dtype=dtype), rtol=1e-2)


def run_dummy(rank: int, world: int) -> bytes:
    """Losses of 1, 2, 3 per row, and NaN at the dummy that fills up the last rank."""
    batch = {"values": torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])}
    with one_group(rank, world, layout="contiguous", sequence_dims={"values": 1}) as context:
        shard = context.shard(batch)
        values = shard.batch["values"]
        values = values.masked_fill(values == 0, float("nan")).requires_grad_()
        with context.active(shard):
            loss = group_mean(values, torch.ones_like(values))
            loss.backward()
    assert values.grad is not None
    return pickle.dumps((loss.item(), values.grad.tolist()))


def test_dummies_are_selected_away_not_multiplied(pool: Pool) -> None:
    first, last = [pickle.loads(x) for x in pool.run(run_dummy, world=2)]
    each = pytest.approx(2 / 6)  # two ranks' mean is taken later
    assert first == (2.0, [[each, each], [each, each]])
    assert last == (2.0, [[each, 0.0], [each, 0.0]])


class Shifter(nn.Module):
    """Shifts labels inside the step, as most language-model losses do."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, labels)


class Holder(nn.Module):
    """A model with its loss in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.criterion = Shifter()

    def forward(self, inputs_embeds: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.head(inputs_embeds), labels)
        return loss


def run_shifted(rank: int, world: int) -> None:
    model = Holder()
    batch = Case(length=12, dtype=torch.float32).batch()
    with one_group(rank, world) as context:
        context.shard(batch, module=model).digest.wait()  # the first of a stage is audited
        shard = context.shard(batch, module=model)
        with context.active(shard):
            model(**shard.batch)


def test_labels_shifted_inside_the_step_are_refused(pool: Pool) -> None:
    for failure in pool.failures(run_shifted, world=2):
        assert failure.kind == "RefusedError"
        assert "module 'criterion' (Shifter, test_loss_steps.py:" in failure.message
        assert "10 targets = 2 rows x (6 local tokens - 1)" in failure.message
        assert "shift labels in the dataset" in failure.message


def run_second_derivative(rank: int, world: int) -> None:
    with one_group(rank, world) as context:
        shard: Shard = context.shard(Case().batch())
        with context.active(shard):
            x = torch.ones(BATCH * shard.batch["labels"].shape[1], requires_grad=True)
            loss = group_mean(x.square(), torch.ones_like(x))
            (dx,) = torch.autograd.grad(loss.square(), x, create_graph=True)
            dx.sum().backward()


def test_second_derivative_is_refused(pool: Pool) -> None:
    for failure in pool.failures(run_second_derivative, world=2):
        assert "token_sums_backward" in failure.message


def run_after(rank: int, world: int) -> bytes:
    """Backward after the context has ended, and plain losses once everything is removed."""
    case = Case(length=7, layout="zigzag")
    model = case.model()
    with one_group(rank, world, layout="zigzag") as context:
        shard = context.shard(case.batch())
        outside = case.value(case.model(), case.batch()).detach()
        with context.active(shard):
            loss = case.value(model, shard.batch)
        found = gradients(loss, model)
        assert SLOT.active is None
    removed = case.value(case.model(), case.batch()).detach()
    return pickle.dumps((found, outside, removed))


def test_outside_a_context_losses_are_plain(pool: Pool) -> None:
    case = Case(length=7)
    model = case.model()
    plain = gradients(case.value(model, case.batch()), model)
    ranks = [pickle.loads(x) for x in pool.run(run_after, world=2)]
    for found, outside, removed in ranks:
        assert torch.equal(outside, plain.loss)
        assert torch.equal(removed, plain.loss)
        assert torch.allclose(found.loss, plain.loss, rtol=1e-12)
    mean = (ranks[0][0].weight + ranks[1][0].weight) / 2
    assert torch.allclose(mean, plain.weight, rtol=1e-12, atol=1e-14)
