"""Swapped losses on shards equal the losses of one process that sees the whole batch."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.api import ContextParallel, Shard
from lightning_cp.config import Config
from lightning_cp.context import SLOT
from lightning_cp.layout import LAYOUTS
from lightning_cp.loss import group_mean
from tests._harness.pool import Pool
from tests._harness.tolerance import assert_as_accurate

pytestmark = pytest.mark.dist

BATCH, CLASSES, WIDTH = 2, 5, 3
IGNORED = -100

LABELS = {
    "dense": lambda s: torch.arange(BATCH * s).reshape(BATCH, s) % CLASSES,
    "prompt": lambda s: labelled(s, range(s // 2 + 1, s)),
    # With 8 tokens on 2 ranks in contiguous order: 3 valid labels on one rank, 1 on the other.
    "uneven": lambda s: labelled(s, [1, 2, 3, 4]),
    "first-only": lambda s: labelled(s, [0]),
    "none": lambda s: labelled(s, []),
}


def labelled(length: int, valid: Any) -> Tensor:
    """Labels of the first row at the positions `valid`; everything else is ignored."""
    labels = torch.full((BATCH, length), IGNORED)
    for position in (p for p in valid if p < length):
        labels[0, position] = position % CLASSES
    return labels


@dataclass(frozen=True)
class Case:
    """A loss over `[B, S]` tokens; as the step of a user would compute it."""

    labels: str = "uneven"
    length: int = 8
    loss: str = "cross_entropy"
    reduction: str = "mean"
    shape: str = "NC"
    weighted: bool = False
    smoothing: float = 0.0
    ignore: int = IGNORED
    soft: bool = False
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        """The id of the test."""
        soft = "soft" if self.soft else self.labels
        flags = f"{'-weighted' * self.weighted}{'-smooth' * bool(self.smoothing)}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.loss}-{self.reduction}-{self.shape}-{soft}-S{self.length}-{self.layout}"
            f"-{dtype}-ignore{self.ignore}{flags}"
        )

    def batch(self) -> dict[str, Tensor]:
        """The whole batch, the same on every rank."""
        generator = torch.Generator().manual_seed(self.length)
        shape = (BATCH, self.length, WIDTH)
        labels = LABELS[self.labels](self.length)
        batch = {
            "inputs_embeds": torch.randn(shape, generator=generator).to(self.dtype),
            "labels": torch.where(labels == IGNORED, self.ignore, labels),
        }
        if self.soft:
            shape = (BATCH, self.length, CLASSES)
            batch["soft"] = torch.randn(shape, generator=generator).softmax(-1).to(self.dtype)
        return batch

    def model(self) -> nn.Linear:
        """Makes the logits; its parameters take the gradients that are compared."""
        model = nn.Linear(WIDTH, CLASSES).to(self.dtype)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter).cos() + number)
        return model

    def value(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, or of a part of it."""
        logits = model(batch["inputs_embeds"])
        target = batch["soft"] if self.soft else batch["labels"]
        if self.shape == "NC":
            logits, target = logits.flatten(0, 1), target.flatten(0, 1)
        else:  # [B, C, S]
            logits = logits.transpose(1, 2)
            target = target.transpose(1, 2) if self.soft else target
        weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0]).to(self.dtype) if self.weighted else None
        options: dict[str, Any] = {"weight": weight, "reduction": self.reduction}
        if not self.soft:
            options["ignore_index"] = self.ignore
        if self.loss == "nll_loss":
            return F.nll_loss(logits.log_softmax(1), target, **options)
        return F.cross_entropy(logits, target, label_smoothing=self.smoothing, **options)


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


class Result(NamedTuple):
    """What a rank, or the one process, found."""

    loss: Tensor
    weight: Tensor
    bias: Tensor


@contextmanager
def parallel(rank: int, world: int, **options: Any) -> Iterator[ContextParallel]:
    """Context parallelism over the ranks of the task, removed at the end."""
    found = ContextParallel(
        dist.new_group(),
        meta=dist.new_group(backend="gloo"),
        rank=rank,
        world=world,
        config=Config(**options),
    )
    try:
        yield found
    finally:
        found.close()


def gradients(loss: Tensor, model: nn.Linear) -> Result:
    """The loss, with the gradients of its sum."""
    loss.sum().backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    return Result(loss.detach(), model.weight.grad, model.bias.grad)


def run_cases(rank: int, world: int, cases: list[Case]) -> bytes:
    found = []
    for layout in ("contiguous", "zigzag"):
        with parallel(rank, world, layout=layout, sequence_dims={"soft": 1}) as context:
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


def run_replicated(rank: int, world: int) -> bytes:
    """A head on inputs that are equal on all ranks, beside a sharded loss in the same step."""
    case = Case(length=8)
    with parallel(rank, world, layout="zigzag") as context:
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
    with parallel(rank, world) as context:
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
    with parallel(rank, world, layout="contiguous", sequence_dims={"values": 1}) as context:
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
    with parallel(rank, world) as context:
        context.shard(batch, module=model).digest.wait()  # the first of a stage is audited
        shard = context.shard(batch, module=model)
        with context.active(shard):
            model(**shard.batch)


def test_labels_shifted_inside_the_step_are_refused(pool: Pool) -> None:
    for failure in pool.failures(run_shifted, world=2):
        assert failure.kind == "RefusedError"
        assert "module 'criterion' (Shifter, test_loss.py:" in failure.message
        assert "10 targets = 2 rows x (6 local tokens - 1)" in failure.message
        assert "shift labels in the dataset" in failure.message


def run_second_derivative(rank: int, world: int) -> None:
    with parallel(rank, world) as context:
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
    with parallel(rank, world, layout="zigzag") as context:
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
