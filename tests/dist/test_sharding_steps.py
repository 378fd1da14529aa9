"""Sharded parameters: steps, modules and precisions out of the ordinary."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_cp.fsdp import whole
from tests._harness.grid import rotated
from tests._harness.models import (
    Case,
    LanguageModel,
    Outcome,
    fit,
    furthest,
    loaders,
    outcome,
    seeded,
    trainer_of,
)
from tests._harness.sharded import DOUBLE, MANUAL, SHARDED, Tied, needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]


class Different(LanguageModel):
    """Other parameters on every rank, until they are sharded."""

    def configure_model(self) -> None:
        if not any(isinstance(x, DTensor) for x in self.parameters()):
            with torch.no_grad():
                for x in self.parameters():
                    x.add_(self.global_rank)


class Adversarial(LanguageModel):
    """Two optimizers, two forwards and backwards in a step, through `forward` and past it."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.automatic_optimization = False

    def forward(self, *inputs: Any) -> Any:
        return self.net(*inputs)

    def training_step(self, batch: Any, index: int) -> None:
        tokens, labels, _, *rest_of = self.fields(batch)
        head, rest = self.optimizers()  # type: ignore[misc]
        self.zero_grad()
        self.toggle_optimizer(head)
        loss = F.cross_entropy(self(tokens, *rest_of).flatten(0, 1), labels.flatten())
        self.manual_backward(loss)
        head.step()
        self.untoggle_optimizer(head)
        head.zero_grad()
        self.toggle_optimizer(rest)
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss(batch))
        self.clip_gradients(rest, gradient_clip_val=0.1)
        rest.step()
        self.untoggle_optimizer(rest)
        self.zero_grad()
        self.log("train_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        head = list(self.net.head.parameters())
        rest = [x for name, x in self.named_parameters() if "head" not in name]
        return [torch.optim.SGD(x, lr=0.2, momentum=0.9) for x in (head, rest)]


class Late(LanguageModel):
    """Steps at the beginning of the next step, when parameters are gathered already."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        if index:
            optimizer.step()
            optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)


class Buffered(LanguageModel):
    """A running statistic that takes part in the loss, and a frozen parameter."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.net.places.weight.requires_grad_(False)

    def on_train_end(self) -> None:
        self.logged.append(float(self.scale))

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.scale += self.fields(batch)[2].double().mean()
        return super().training_step(batch, index) * self.scale.clone()


UNUSUAL = {
    Different: (DOUBLE, 1),
    Adversarial: (MANUAL, 1),
    Late: (MANUAL, 1),
    Tied: (DOUBLE, 1),
    Buffered: (replace(DOUBLE, samples=8), 2),
}


@pytest.mark.parametrize(
    ("kind", "policy", "stage"),
    rotated(UNUSUAL, [(None, 3), ((), 1), (None, 2), ((), 3)]),
    ids=lambda x: {None: "blocks", (): "root"}.get(x) or getattr(x, "__name__", str(x)),
)
def test_unusual_steps(kind, policy, stage, pool):
    case, dp = UNUSUAL[kind]
    expected = pool.run(fit, case, None, kind, world=dp)
    options = {"zero_stage": stage, "context_parallel_size": 2, "auto_wrap_policy": policy}
    for rank, found in enumerate(pool.run(fit, case, options, kind, world=2 * dp)):
        distances = furthest(found, expected[rank // 2])
        assert max(distances.values()) <= 1e-12, distances


@pytest.mark.parametrize(
    ("precision", "more", "limit"),
    [
        ("bf16-mixed", {}, 5e-3),
        (
            "bf16-mixed",
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
            2e-2,
        ),
    ],
)
def test_half_precision_is_close(precision, more, limit, pool, plain):
    case = Case(precision=precision)
    (expected,) = plain(case)
    for found in pool.run(fit, case, {**SHARDED, **more}, world=2):
        assert max(furthest(found, expected).values()) <= limit, furthest(found, expected)


def fit_in_half(rank: int, world: int, options: dict[str, Any] | None) -> dict[str, Any]:
    model = seeded(Case())
    run = trainer_of(rank, world, Case(precision="bf16-true"), options)
    run.fit(model, *loaders(Case()))
    assert all(x.dtype == torch.bfloat16 for x in model.parameters())
    return {
        name: whole(x, keep=True).detach().float().numpy() for name, x in model.named_parameters()
    }


def test_parameters_in_half_precision(pool):
    (expected,) = pool.run(fit_in_half, None, world=1)
    for found in pool.run(fit_in_half, SHARDED, world=2):
        for name, value in expected.items():
            assert np.abs(found[name] - value).max() <= 2e-2, name


def runs_after_runs(rank: int, world: int, options: dict[str, Any] | None) -> tuple[Any, Outcome]:
    """Evaluates, trains, evaluates, and trains again, one module and a Trainer for each."""
    case = replace(DOUBLE, momentum=0.9)
    model = seeded(case)
    train, valid = loaders(case)
    losses = []
    run = partial(trainer_of, rank, world, case, options)
    for _ in range(2):
        for stage in ("validate", "test"):
            evaluation = run()
            getattr(evaluation, stage)(model, valid, verbose=False)
            losses.append(float(evaluation.callback_metrics["val_loss"]))
        last = run(num_sanity_val_steps=1, val_check_interval=1)
        last.fit(model, train, valid)
    return losses, outcome(last, model)


def test_runs_after_runs(pool):
    ((losses, expected),) = pool.run(runs_after_runs, None, world=1)
    for found, one in pool.run(runs_after_runs, SHARDED, world=2):
        assert found == pytest.approx(losses, rel=1e-12)
        assert max(furthest(one, expected).values()) <= 1e-12


class Experts(LanguageModel):
    """One layer for the first half of a sequence and one for the other: a rank uses one of them."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def loss(self, batch: Any) -> Tensor:
        tokens, labels, _, positions, *rest = self.fields(batch)
        logits = self.net(tokens, positions, *rest)
        early = (positions < 12).expand(tokens.shape)
        mixed = torch.zeros_like(logits)
        for layer, places in ((self.first, early), (self.second, ~early)):
            if bool(places.any()):
                mixed[places] = layer(logits[places])
        return F.cross_entropy((logits + mixed).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("policy", [None, ()], ids=["blocks", "root"])
def test_parameters_that_one_rank_uses(policy, pool):
    case = replace(DOUBLE, offset=0)
    (expected,) = pool.run(fit, case, None, Experts, world=1)
    options = {**SHARDED, "layout": "contiguous", "auto_wrap_policy": policy}
    for found in pool.run(fit, case, options, Experts, world=2):
        assert furthest(found, expected)["parameters"] <= 1e-12, furthest(found, expected)
