"""Losses over elements (`mse_loss` and its kin) on shards equal those of one process."""

import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.api import ContextParallel
from lightning_cp.swap.functions import LOSSES
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.tolerance import assert_as_accurate

pytestmark = pytest.mark.dist

BATCH, WIDTH, IN = 2, 3, 4


@dataclass(frozen=True)
class Case:
    """A loss over `[B, S, ...]`, as the step of a user would compute it.

    Attributes:
        shape: "BSD", "BS", "ND" and "N" (rows and tokens flattened), or "BC" for rows that are
            equal on all peers.
        options: of the function; "weight" and "pos_weight" are made where True.
    """

    name: str = "mse_loss"
    reduction: str = "mean"
    shape: str = "BSD"
    length: int = 10
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        """The id of the test."""
        options = "".join(f"-{name}={value}" for name, value in self.options)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name}-{self.reduction}-{self.shape}-S{self.length}-{self.layout}-{dtype}"
            f"{options}"
        )

    def batch(self) -> dict[str, Tensor]:
        """The whole batch; targets and weights are of every kind that a loss here takes."""
        generator = torch.Generator().manual_seed(self.length)

        def drawn(width: int) -> Tensor:
            shape = (BATCH, self.length, width)
            return torch.rand(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        return {"inputs_embeds": drawn(IN), "target": drawn(WIDTH), "weight": drawn(WIDTH)}

    def model(self) -> nn.Linear:
        """Makes what is compared with the target; takes the gradients."""
        model = nn.Linear(IN, WIDTH).to(self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter).cos())
        return model

    def value(self, model: nn.Module, batch: dict[str, Tensor], call: Any = None) -> Tensor:
        """The loss of a batch, or of a part of it."""
        found, target, weight = model(batch["inputs_embeds"]), batch["target"], batch["weight"]
        if self.shape == "BC":  # as of a pooled head: the same on every rank
            found, target, weight = (
                model(torch.ones(BATCH, IN).to(self.dtype)),
                *(torch.full((BATCH, WIDTH), value).to(self.dtype) for value in (0.25, 0.5)),
            )
        tensors = [self._shaped(x) for x in (found, target, weight)]
        found, target, weight = tensors
        if self.name == "binary_cross_entropy":
            found = found.sigmoid()
        if self.name == "kl_div":
            found, target = found.log_softmax(-1), target.softmax(-1)
        options = dict(self.options)
        if options.get("log_target"):
            target = target.log()
        if options.get("weight"):
            options["weight"] = weight
        if options.get("pos_weight"):
            options["pos_weight"] = torch.tensor([1.0, 2.0, 3.0]).to(self.dtype)
        if not {"size_average", "reduce"} & options.keys():
            options["reduction"] = self.reduction
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "reduction: 'mean' divides the total|size_average")
            return (call or getattr(F, self.name))(found, target, **options)

    def _shaped(self, x: Tensor) -> Tensor:
        x = x[..., 0] if self.shape in ("BS", "N") else x
        return x.flatten(0, 1) if self.shape in ("N", "ND") else x


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


CASES = (
    *(Case(name, reduction, shape) for name in LOSSES for reduction in ("mean", "sum", "none")
      for shape in ("BSD", "ND")),
    *(Case("mse_loss", reduction, shape, length, layout) for reduction in ("mean", "sum")
      for shape in ("BSD", "BS", "ND", "N") for length in (1, 2, 7, 24)
      for layout in ("contiguous", "zigzag")),
    *(Case("kl_div", "batchmean", shape, length, "zigzag", options=given)
      for shape in ("BSD", "ND") for length in (1, 2, 7)
      for given in ((), options(log_target=True))),
    *(Case(name, reduction, "BC", 7) for name in LOSSES for reduction in ("mean", "sum", "none")),
    Case("kl_div", "batchmean", "BC", 7),
    *(Case(name, reduction, "BSD", length, options=options(weight=True))
      for name in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy",
                   "binary_cross_entropy_with_logits")
      for reduction in ("mean", "sum", "none") for length in (2, 7)),
    *(Case("binary_cross_entropy_with_logits", reduction, "ND", 7,
           options=options(pos_weight=True, weight=True)) for reduction in ("mean", "sum")),
    *(Case("smooth_l1_loss", reduction, options=options(beta=beta)) for beta in (0.0, 0.2)
      for reduction in ("mean", "sum")),
    Case("huber_loss", "mean", options=options(delta=0.1)),
    *(Case(name, reduction, options=options(**given))
      for name in ("mse_loss", "binary_cross_entropy", "kl_div")
      for reduction, given in (("mean", {"size_average": True}), ("sum", {"size_average": False}),
                               ("none", {"reduce": False}))),
    *(Case(name, reduction, "BSD", 7, dtype=dtype)
      for name in ("mse_loss", "binary_cross_entropy_with_logits")
      for dtype in (torch.float32, torch.bfloat16) for reduction in ("mean", "sum")),
)  # fmt: skip
"""Every case runs on 1, 2 and 3 ranks."""


def parallel(rank: int, world: int, layout: str) -> AbstractContextManager[ContextParallel]:
    """Context parallelism over the ranks of the task, removed at the end."""
    return one_group(rank, world, layout=layout, sequence_dims={"target": 1, "weight": 1})


def gradients(loss: Tensor, model: nn.Linear) -> list[Tensor]:
    """The loss, and the gradients of its sum."""
    loss.sum().backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    return [loss.detach(), model.weight.grad, model.bias.grad]


def run_cases(rank: int, world: int, cases: list[Case]) -> bytes:
    found = []
    for layout in ("contiguous", "zigzag"):
        with parallel(rank, world, layout) as context:
            for case in cases:
                if case.layout != layout:
                    continue
                model = case.model()
                shard = context.shard(case.batch())
                kept = shard.cut.sequence.real(rank)
                for name in ("inputs_embeds", "target"):  # what dummies hold must not matter
                    shard.batch[name][:, ~kept] = 0.75
                with context.active(shard):
                    result = gradients(case.value(model, shard.batch), model)
                found.append((case, result))
    return pickle.dumps(found)


Results = dict[int, list[dict[Case, list[Tensor]]]]


@pytest.fixture(scope="module")
def results(pool: Pool) -> Results:
    """For 1, 2 and 3 ranks what every rank found in every case."""
    found = {world: pool.run(run_cases, list(CASES), world=world) for world in (1, 2, 3)}
    return {world: [dict(pickle.loads(x)) for x in ranks] for world, ranks in found.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", [c for c in CASES if c.reduction != "none"], ids=str)
def test_value_and_mean_of_gradients(case: Case, world: int, results: Results) -> None:
    ranks = [found[case] for found in results[world]]
    model = case.model()
    plain = gradients(case.value(model, case.batch()), model)
    precise = case.model().double()
    double = Case(**{**vars(case), "dtype": torch.float64})
    exact = gradients(
        double.value(precise, {k: x.double() for k, x in case.batch().items()}), precise
    )
    for rank, found in enumerate(ranks):
        assert found[0].dtype == case.dtype
        assert torch.equal(found[0], ranks[0][0]), "the same scalar on every rank"
        where = f"rank {rank} of {world}: loss of {case}"
        assert_as_accurate(found[0], exact[0], plain[0], where=where)
    for number, name in ((1, "weight"), (2, "bias")):
        mean = torch.stack([found[number] for found in ranks]).double().mean(0).to(case.dtype)
        where = f"mean over {world} ranks of the gradient of {name} of {case}"
        assert_as_accurate(mean, exact[number], plain[number], where=where)


@pytest.mark.parametrize("case", [c for c in CASES if c.reduction == "none"], ids=str)
def test_without_reduction_nothing_changes(case: Case, results: Results) -> None:
    whole = case.value(case.model(), case.batch()).detach()
    for ranks in results.values():
        shards = [found[case][0] for found in ranks]
        if case.shape == "BC":
            assert all(torch.equal(shard, whole) for shard in shards)
            continue
        if case.shape == "ND":
            shards = [shard.unflatten(0, (BATCH, -1)) for shard in shards]
        found = torch.cat(shards, 1)[:, : case.length]
        torch.testing.assert_close(found.reshape(whole.shape), whole, rtol=1e-12, atol=1e-14)


def run_chance(rank: int, world: int) -> list[float]:
    """`[B, 4]` on all ranks, where one rank's share of 7 tokens is 4 and the other's 3.

    And `[B, 3]`, which on the first rank only is a share without a token.
    """
    with parallel(rank, world, "contiguous") as context:
        shard = context.shard(Case(length=7).batch())
        assert shard.batch["target"].shape[1] == (4, 3)[rank]
        x = torch.ones(BATCH, 4, requires_grad=True)
        with context.active(shard):
            sums = F.mse_loss(x, torch.zeros(BATCH, 4), reduction="sum")
            means = F.mse_loss(x, torch.zeros(BATCH, 4))
            (sums + means).backward()
            assert F.l1_loss(torch.ones(BATCH, 3), torch.zeros(BATCH, 3), reduction="sum") == 6
    assert x.grad is not None
    return [sums.item(), means.item(), *x.grad.unique().tolist()]


def test_a_shape_that_is_a_share_by_chance_is_replicated(pool: Pool) -> None:
    """All ranks decide alike, from the shapes on all ranks."""
    for found in pool.run(run_chance, world=2):
        assert found == [8.0, 1.0, 2.0 + 2.0 / 8]


MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


def run_modules(rank: int, world: int) -> list[float]:
    """Modules of torch.nn look their function up when they are called."""
    case = Case()
    with parallel(rank, world, "zigzag") as context:
        shard = context.shard(case.batch())
        with context.active(shard):
            found = [make()(shard.batch["target"], shard.batch["weight"]) for make in MODULES]
            assert shard.context.log.loss == len(found)
    return [value.item() for value in found]


def test_modules_of_torch(pool: Pool) -> None:
    batch = Case().batch()
    expected = [make()(batch["target"], batch["weight"]).item() for make in MODULES]
    for found in pool.run(run_modules, world=2):
        assert found == pytest.approx(expected, rel=1e-12)


class Next(nn.Module):
    """Predicts the next vector, shifting inside the step."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(x[:, :-1], x[:, 1:])


class Learned(nn.Module):
    """Divides by a weight that is learned."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(x, 0 * x, weight=torch.ones_like(x, requires_grad=True))


def run_refused(rank: int, world: int, make: Callable[[], nn.Module]) -> None:
    model = make()
    with parallel(rank, world, "contiguous") as context:
        batch = {"inputs_embeds": torch.ones(BATCH, 12, WIDTH)}
        context.shard(batch, module=model).digest.wait()  # the first of a stage is audited
        shard = context.shard(batch, module=model)
        with context.active(shard):
            model(shard.batch["inputs_embeds"])


def test_refused(pool: Pool) -> None:
    for failure in pool.failures(run_refused, Next, world=2):
        assert failure.kind == "RefusedError"
        assert "the root module (Next, test_elements.py:" in failure.message
        assert "10 targets = 2 rows x (6 local tokens - 1)" in failure.message
    for failure in pool.failures(run_refused, Learned, world=2):
        assert failure.kind == "RefusedError"
        assert "that is learned: not supported" in failure.message


def run_compiled(rank: int, world: int) -> tuple[int, list[float]]:
    """One graph serves batches of all contexts, and code outside; nothing is compiled again."""
    torch._dynamo.reset()
    case = Case(length=12, layout="zigzag")
    call = torch.nn.functional
    found = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, target = model(batch["inputs_embeds"]), batch["target"]
        value = call.mse_loss(x, target) + call.l1_loss(x, target, reduction="sum")
        return value + call.binary_cross_entropy_with_logits(x, target, reduction="mean")

    with parallel(rank, world, "zigzag") as context:
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=False)
        for _ in range(4):
            model = case.model()
            shard = context.shard(case.batch())
            with context.active(shard):
                value, grad, _ = gradients(compiled(model, shard.batch), model)
            found += [value.item(), grad.sum().item()]
            outside = compiled(case.model(), shard.batch)
            torch.testing.assert_close(outside, loss(case.model(), shard.batch))
    torch._dynamo.reset()
    return counter.frame_count, found


def test_compiled_once(pool: Pool) -> None:
    case, model = Case(length=12), Case().model()
    whole = case.batch()
    x = model(whole["inputs_embeds"])
    value = F.mse_loss(x, whole["target"]) + F.l1_loss(x, whole["target"], reduction="sum")
    value = value + F.binary_cross_entropy_with_logits(x, whole["target"])
    expected, grad, _ = gradients(value, model)
    ranks = pool.run(run_compiled, world=2, timeout=110)
    assert [frames for frames, _ in ranks] == [1, 1]
    for _, found in ranks:
        assert found[::2] == pytest.approx([expected.item()] * 4, rel=1e-12)
    mean = sum(found[1] for _, found in ranks) / 2
    assert mean == pytest.approx(grad.sum().item(), rel=1e-12)


def run_recorded(rank: int, world: int) -> None:
    """Outside a context the functions are torch's own, bit by bit; then they are gone."""
    originals = {name: getattr(F, name) for name in LOSSES}
    case = Case(dtype=torch.float32)
    with parallel(rank, world, "contiguous"):
        for name, original in originals.items():
            assert getattr(F, name) is not original
            plain = Case(name, dtype=torch.float32)
            assert torch.equal(
                plain.value(case.model(), case.batch()),
                plain.value(case.model(), case.batch(), original),
            )
    assert {name: getattr(F, name) for name in LOSSES} == originals


def test_outside_a_context_and_after(pool: Pool) -> None:
    pool.run(run_recorded, world=1)
