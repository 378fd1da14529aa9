"""Sharded parameters of every kind: each that is trained is averaged once, at each stage."""

import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.gradients import clip_grad_norm, grad_norm
from tests._harness.grid import rare, rotated
from tests._harness.models import (
    Case,
    LanguageModel,
    fit,
    furthest,
    loaders,
    outcome,
    seeded,
    trainer_of,
)
from tests._harness.rows import assert_same, trainer
from tests._harness.sharded import DOUBLE, Tied, needs_sharding
from tests._harness.shared import Shareable, plan

pytestmark = [pytest.mark.dist, needs_sharding]

CLIPPED = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)
FOUR = replace(DOUBLE, samples=8, momentum=0.9, trainer=CLIPPED)


class Adapted(nn.Module):
    """A frozen layer with a trained difference of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapters(LanguageModel):
    """Trains the adapters of attention alone."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.net.requires_grad_(False)
        for block in self.net.blocks:
            block.attention.q = Adapted(block.attention.q)
            block.attention.out = Adapted(block.attention.out)


class FrozenBlock(LanguageModel):
    """One block is frozen, and the bias of another layer."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.net.blocks[0].requires_grad_(False)
        self.net.head.bias.requires_grad_(False)


class Scalars(LanguageModel):
    """Trained and frozen scalars in blocks and outside, used by every rank or by the first."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        for block in self.net.blocks:
            block.gate = nn.Parameter(torch.tensor(0.5))
            block.register_forward_hook(lambda part, args, out: args[0] + part.gate * out)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.temperature + self.offset


class Outside(LanguageModel):
    """Parameters of the LightningModule itself, one of them without any use."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.scale = nn.Parameter(torch.ones(3))
        self.idle = nn.Parameter(torch.ones(5), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale.sum() / 3


KINDS = [Adapters, FrozenBlock, Scalars, Outside, Tied]
WAYS = [(2, 1, 1), (2, 1, 2), (2, 1, 3), (4, 2, 2), (4, 2, 3)]


@pytest.mark.parametrize(("kind", "world", "replicas", "stage"), rotated(KINDS, WAYS))
def test_every_kind(kind, world, replicas, stage, pool):
    case = replace(FOUR, samples=8 * replicas)
    expected = pool.run(fit, case, None, kind, world=replicas)
    options = {"zero_stage": stage, "data_parallel_replicate_size": replicas}
    options["context_parallel_size"] = 2
    for rank, found in enumerate(pool.run(fit, case, options, kind, world=world)):
        assert_same(found, expected[rank // 2], 1e-12, where=f"rank {rank}")


class Normed(Shareable):
    """Remembers norms of its gradients."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.norms: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.temperature

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for exponent in (2.0, 1.0, 3.5, math.inf):
            self.norms.append(float(grad_norm(self.parameters(), exponent)))
        clip_grad_norm(self.parameters(), 0.05, 3.0)
        self.norms.append(float(grad_norm(self.parameters(), 3.0)))
        first, *_, last = (x for x in self.parameters() if x.ndim == 2)
        for x, value in ((first, math.inf), (last, math.nan)):
            local = x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
            with torch.no_grad():  # ranks that share layers have equal gradients of what they copy
                local[0, 0] = value if self.global_rank <= self.trainer.world_size // 4 else 0.0
            kept = x.grad.clone()
            with pytest.raises(RuntimeError, match="error_if_nonfinite=True"):
                grad_norm(self.parameters(), error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="the norm of the gradients is"):
                clip_grad_norm(self.parameters(), 1.0, error_if_nonfinite=True)
            assert torch.equal(kept.nan_to_num(), x.grad.nan_to_num())
            x.grad.zero_()


def norms(rank: int, world: int, options: Any) -> list[float]:
    case = replace(FOUR, samples=4, trainer=())
    model = seeded(case, kind=Normed)
    trainer_of(rank, world, case, options).fit(model, *loaders(case))
    return model.norms


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"zero_stage": 3}),
        (4, {"zero_stage": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": plan()}),
    ],
    ids=["shard2", "shard2-tp2"],
)
def test_norms_count_every_element_once(world, options, pool):
    (expected,) = pool.run(norms, None, world=1)
    for found in pool.run(norms, {**options, "context_parallel_size": 2}, world=world):
        assert found == pytest.approx(expected, rel=1e-12)


class Unmade(LanguageModel):
    """Made on the device "meta"; values come later, in the order of modules."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        with torch.device("meta"):
            super().__init__(case, dense)


class Statistics(nn.Module):
    """No way to give its buffer values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(3, device="meta"))


class Incomplete(Unmade):
    """One module cannot be made."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.statistics = Statistics()


def fit_unmade(rank: int, world: int, options: dict[str, Any], kind: Any, replicated: bool) -> Any:
    """From values that `reset_parameters` draws; those of other ranks than the first are others."""
    pl.seed_everything(7, verbose=False)
    model = kind(DOUBLE)
    torch.manual_seed(11 + (0 if replicated else rank))
    run = trainer_of(rank, world, DOUBLE, options)
    run.fit(model, *loaders(DOUBLE))
    return outcome(run, model)


def fit_made(rank: int, world: int, first: tuple[str, ...]) -> Any:
    """The same values, drawn module by module in the order of the blocks, then of the rest."""
    pl.seed_everything(7, verbose=False)
    model = LanguageModel(DOUBLE)
    torch.manual_seed(11)
    parts = dict(model.named_modules())
    drawn: set[nn.Module] = set()
    for name in (*first, ""):
        for part in parts[name].modules():
            if hasattr(part, "reset_parameters") and part not in drawn:
                part.reset_parameters()
                drawn.add(part)
    run = trainer_of(rank, world, DOUBLE, None)
    run.fit(model, *loaders(DOUBLE))
    return outcome(run, model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_module_on_meta(stage, pool):
    blocks = ("net.blocks.0", "net.blocks.1") if stage else ()
    (expected,) = pool.run(fit_made, blocks, world=1)
    options = {"zero_stage": stage}
    for found in pool.run(fit_unmade, options, Unmade, stage == 0, world=2):
        assert max(furthest(found, expected).values()) <= 1e-12, furthest(found, expected)


def test_module_on_meta_that_cannot_be_made(pool):
    for failure in pool.failures(fit_unmade, {"zero_stage": 3}, Incomplete, True, world=2):
        assert failure.kind == "ConfigError", failure.trace
        assert "'running' of module 'statistics' (Statistics)" in failure.message


class Grouped(Scalars):
    """A kernel for all parameters of a group, sharded and whole ones."""

    apart = False

    def configure_optimizers(self) -> Any:
        scalars = [x for x in self.parameters() if x.ndim == 0]
        others = [x for x in self.parameters() if x.ndim > 0]
        groups = [{"params": others}, {"params": scalars}]
        given = groups if self.apart else self.parameters()
        return torch.optim.AdamW(given, lr=1e-2, foreach=True)


class Apart(Grouped):
    """In groups of their own."""

    apart = True


def test_kernels_over_groups(pool):
    case = replace(FOUR, momentum=0.0)
    (expected,) = pool.run(fit, case, None, Apart, world=1)
    for found in pool.run(fit, case, {"zero_stage": 2}, Apart, world=2):
        assert_same(found, expected, 1e-9)
    for failure in pool.failures(fit, case, {"zero_stage": 2}, Grouped, world=2):
        assert failure.kind == "ConfigError", failure.trace
        assert "AdamW(foreach=True)" in failure.message


def fit_offloaded(rank: int, world: int) -> None:
    fit(rank, world, Case(), {"zero_stage": 3, "cpu_offload": True})


def test_offload_needs_an_accelerator(pool):
    for failure in pool.failures(fit_offloaded, world=2):
        assert failure.kind == "ConfigError"
        assert "this run is on the CPU" in failure.message


def fit_scaled(rank: int, world: int, options: Any, overflow: bool) -> tuple[Any, list[float]]:
    """With a scaler, whose scale may be too large for half precision."""
    case = replace(DOUBLE, precision=None, samples=12)
    model = seeded(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20 if overflow else 2.0**7)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = trainer_of(rank, world, case, options)
    run.strategy.precision_plugin = plugin
    run.fit(model, *loaders(case))
    return outcome(run, model), [float(scaler.get_scale())]


@pytest.mark.parametrize("stage", rare([0, 1, 3], [1]))
def test_scaled_half_precision(stage, pool):
    ((expected, scale),) = pool.run(fit_scaled, None, False, world=1)
    for one, own in pool.run(fit_scaled, {"zero_stage": stage}, False, world=2):
        assert own == scale == [2.0**7]
        assert furthest(one, expected)["parameters"] <= 1e-3


@pytest.mark.parametrize("stage", rare([1, 3], [1]))
def test_overflow_in_half_precision(stage, pool):
    """All ranks skip the same steps; a backward on two ranks has gradients of twice the size."""
    ((_, scale),) = pool.run(fit_scaled, None, True, world=1)
    found = pool.run(fit_scaled, {"zero_stage": stage}, True, world=2)
    assert found[0][1] == found[1][1] == [scale[0] / 2] < [2.0**19]
    assert furthest(found[0][0], found[1][0])["parameters"] == 0.0
