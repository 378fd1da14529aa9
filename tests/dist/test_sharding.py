"""Sharded parameters: who holds what, what is refused, and steps that do unusual things."""

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp import verify
from lightning_cp.fsdp import whole
from lightning_cp.plugin.sharding import policy_of
from tests._harness.grid import rotated
from tests._harness.models import (
    Block,
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

pytestmark = pytest.mark.dist

DOUBLE = Case(precision="64-true")
SHARDED = {"zero_stage": 3}


class Seen(LanguageModel):
    """Looks at itself in the middle of training."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        optimizer: Any = self.optimizers()
        state = [x["momentum_buffer"] for x in optimizer.state.values()]
        tensors = [*self.parameters(), *(p.grad for p in self.parameters()), *state]
        assert all(isinstance(x, DTensor) for x in tensors)
        self.local = sum(p.to_local().numel() for p in self.parameters())
        self.whole = sum(p.numel() for p in self.parameters())
        self.wrapped = [name for name, x in self.named_modules() if isinstance(x, FSDPModule)]
        self.groups = {p.device_mesh.get_group().group_name for p in self.parameters()}
        strategy: Any = self.trainer.strategy
        mesh = strategy._mesh
        others = (dist.group.WORLD, mesh.cp, mesh.meta, mesh.grad)
        self.others = {group.group_name for group in others}


def look(rank: int, world: int, options: dict[str, Any]) -> tuple[int, int, list[str], bool]:
    case = Case(samples=4, momentum=0.9)
    pl.seed_everything(7, verbose=False)
    model = Seen(case)
    trainer_of(rank, world, case, {**SHARDED, **options}).fit(model, *loaders(case))
    assert len(model.groups) == 1
    return model.local, model.whole, model.wrapped, model.groups.isdisjoint(model.others)


@pytest.mark.parametrize(
    ("world", "options"), [(2, {}), (3, {}), (4, {"context_parallel_size": 2})]
)
def test_every_rank_holds_its_part(world, options, pool):
    found = pool.run(look, options, world=world)
    total = found[0][1]
    assert sum(local for local, *_ in found) == total
    for local, _, wrapped, own in found:
        assert local * world / total - 1 < 0.04  # 16 rows do not divide by 3
        assert wrapped == ["", "net.blocks.0", "net.blocks.1"]
        assert own


@pytest.mark.parametrize(
    ("policy", "wrapped"),
    [
        ((), [""]),
        ({Block}, ["", "net.blocks.0", "net.blocks.1"]),
        ({Block, nn.Embedding}, ["", "net.tokens", "net.places", "net.blocks.0", "net.blocks.1"]),
        (partial(isinstance, class_or_tuple=Block), None),
    ],
)
def test_wrap_policy(policy, wrapped, pool):
    if wrapped is None:
        policy, wrapped = is_head, ["", "net.head"]
    for _, _, names, _ in pool.run(look, {"auto_wrap_policy": policy}, world=2):
        assert names == wrapped


def is_head(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and part.out_features == 256


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


class Tied(LanguageModel):
    """Head and embedding are one; so are layers of the two blocks."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.net.head.weight = self.net.tokens.weight
        self.net.blocks[1].attention.q.weight = self.net.blocks[0].attention.q.weight


class Buffered(LanguageModel):
    """A running statistic that takes part in the loss, and a frozen parameter."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.net.places.weight.requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.scale += self.fields(batch)[2].double().mean()
        return super().training_step(batch, index) * self.scale.clone()


def fit_of(
    rank: int, world: int, kind: type[LanguageModel], case: Case, options: dict[str, Any] | None
) -> Outcome:
    pl.seed_everything(7, verbose=False)
    model = kind(case, options is None)
    run = trainer_of(rank, world, case, options)
    run.fit(model, *loaders(case))
    if isinstance(model, Buffered):
        model.logged.append(float(model.scale))
    return outcome(run, model)


MANUAL = replace(DOUBLE, optimisation="manual")


UNUSUAL = {
    Different: (DOUBLE, 1),
    Adversarial: (MANUAL, 1),
    Late: (MANUAL, 1),
    Tied: (DOUBLE, 1),
    Buffered: (replace(DOUBLE, samples=8), 2),
}


@pytest.mark.parametrize(
    ("kind", "policy"),
    rotated(UNUSUAL, [(None,), ((),)]),
    ids=lambda x: {None: "blocks", (): "root"}.get(x) or x.__name__,
)
def test_unusual_steps(kind, policy, pool):
    case, dp = UNUSUAL[kind]
    expected = pool.run(fit_of, kind, case, None, world=dp)
    options = {**SHARDED, "context_parallel_size": 2, "auto_wrap_policy": policy}
    for rank, found in enumerate(pool.run(fit_of, kind, case, options, world=2 * dp)):
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


def test_policy_follows_the_precision():
    plugins = {
        name: trainer_of(0, 1, Case(precision=name), {}).precision_plugin
        for name in ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
    }
    found = {name: policy_of(plugin, None) for name, plugin in plugins.items()}
    assert {policy.param_dtype for policy in found.values()} == {None}
    reduced = {name for name, policy in found.items() if policy.reduce_dtype == torch.float32}
    assert reduced == {"bf16-true", "16-true"}
    own = MixedPrecisionPolicy(torch.bfloat16)
    assert policy_of(plugins["32-true"], own) is own


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


class ShardedByUser(LanguageModel):
    """Calls fully_shard itself, on all of itself."""

    blocks_only = False

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (self.trainer.world_size,))
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        if not self.blocks_only:
            fully_shard(self, mesh=mesh)


class ShardedInParts(ShardedByUser):
    """Leaves its root alone."""

    blocks_only = True


def test_module_that_comes_sharded(pool, plain):
    (expected,) = plain(DOUBLE)
    for found in pool.run(fit_of, ShardedByUser, DOUBLE, SHARDED, world=2):
        assert max(furthest(found, expected).values()) <= 1e-12


class Early(LanguageModel):
    """Makes its optimizer too early."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Scalar(LanguageModel):
    """Has a parameter without dimensions."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def fit_with(rank: int, world: int, kind: type[LanguageModel], what: str) -> None:
    model = kind(Case())
    more: dict[str, Any] = {}
    if what == "swa":
        more["callbacks"] = [StochasticWeightAveraging(1e-2)]
    run = trainer_of(rank, world, Case(), SHARDED, **more)
    if what == "precision":
        run.strategy.precision_plugin = FSDPPrecision("bf16-mixed")
    run.fit(model, *loaders(Case()))


def tied_policy(rank: int, world: int) -> None:
    options = {**SHARDED, "auto_wrap_policy": {Block}}
    trainer_of(rank, world, Case(), options).fit(Tied(Case()), *loaders(Case()))


@pytest.mark.parametrize(
    ("kind", "what", "messages"),
    [
        (Early, "", ("parameters of SGD", "configure_optimizers")),
        (Scalar, "", ("'temperature' has 0 dimensions", "shape (1,)", "zero_stage=0")),
        (ShardedInParts, "", ("ShardedInParts", "auto_wrap_policy")),
        (LanguageModel, "swa", ("StochasticWeightAveraging", "zero_stage=0")),
        (LanguageModel, "precision", ("FSDPPrecision", "bf16-mixed")),
    ],
    ids=["early", "scalar", "in-parts", "swa", "precision"],
)
def test_refused(kind, what, messages, pool):
    for failure in pool.failures(fit_with, kind, what, world=2):
        assert failure.kind == "ConfigError"
        for message in messages:
            assert message in failure.message


def test_wrapped_block_with_a_tied_parameter(pool):
    for failure in pool.failures(tied_policy, world=2):
        assert failure.kind == "ConfigError"
        assert "'net.blocks.1' shares a parameter" in failure.message


def fit_verified(
    rank: int, world: int, kind: type[LanguageModel], case: Case, options: dict[str, Any]
) -> Outcome:
    return fit_of(rank, world, kind, case, {**SHARDED, "verify": "first_batch", **options})


class Numbered(LanguageModel):
    """Makes positions of its own, from the number of local tokens."""

    def fields(self, batch: Any) -> tuple[Any, ...]:
        tokens, labels, ids, positions, *rest = super().fields(batch)
        if positions is not None:
            positions = positions * 0 + torch.tensor(range(tokens.shape[1]))
        return tokens, labels, ids, positions, *rest


@pytest.mark.parametrize(
    ("kind", "case", "dp"),
    [
        pytest.param(LanguageModel, DOUBLE, 1, marks=pytest.mark.full),
        (LanguageModel, replace(DOUBLE, samples=12), 2),
        (LanguageModel, MANUAL, 1),
    ],
)
def test_verified_run_is_the_same(kind, case, dp, pool, plain):
    expected = plain(case, dp)
    options = {"context_parallel_size": 2}
    for rank, found in enumerate(pool.run(fit_verified, kind, case, options, world=2 * dp)):
        distances = furthest(found, expected[rank // 2])
        assert max(distances.values()) <= 1e-12, distances


def test_verification_finds_the_module(pool):
    for failure in pool.failures(fit_verified, Numbered, DOUBLE, {}, world=2):
        assert failure.kind == "VerificationError", failure.trace
        assert "net" in failure.message


def gradients_of(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    """Errors of every gradient, as a verification compares them."""
    found: dict[str, float] = {}

    class Verified(LanguageModel):
        def on_train_start(self) -> None:
            super().on_train_start()
            strategy: Any = self.trainer.strategy
            batch = next(iter(loaders(self.case)[0]))
            report = verify(self, batch, parallel=strategy._parallel, show=False)
            report.raise_if_wrong()
            found.update(report.compared.gradients)

    pl.seed_everything(7, verbose=False)
    trainer_of(rank, world, DOUBLE, options).fit(Verified(DOUBLE), *loaders(DOUBLE))
    return found


def test_verification_compares_whole_gradients(pool):
    (expected, _), (found, other) = (
        pool.run(gradients_of, options, world=2) for options in ({}, SHARDED)
    )
    assert found.keys() == expected.keys()
    assert found == other
    assert len(found) > 20


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
    (expected,) = pool.run(fit_of, Experts, case, None, world=1)
    options = {**SHARDED, "layout": "contiguous", "auto_wrap_policy": policy}
    for found in pool.run(fit_of, Experts, case, options, world=2):
        assert furthest(found, expected)["parameters"] <= 1e-12, furthest(found, expected)
