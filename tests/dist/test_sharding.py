"""Sharded parameters: who holds what, and what is refused."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.plugin.parts import policy_of
from tests._harness.models import Block, Case, LanguageModel, fit, furthest, loaders, trainer_of
from tests._harness.sharded import DOUBLE, SHARDED, Tied, needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]


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
        others = (dist.group.WORLD, mesh.cp, mesh.cp_a2a, mesh.meta, mesh.grad)
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


@pytest.mark.parametrize("options", [SHARDED, {}], ids=["asked", "not-asked"])
@pytest.mark.parametrize("kind", [ShardedByUser, ShardedInParts])
def test_module_that_comes_sharded(kind, options, pool, plain):
    (expected,) = plain(DOUBLE)
    for found in pool.run(fit, DOUBLE, options, kind, world=2):
        assert max(furthest(found, expected).values()) <= 1e-12


class Early(LanguageModel):
    """Makes its optimizer too early."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


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
        (LanguageModel, "swa", ("StochasticWeightAveraging", "zero_stage=0")),
        (LanguageModel, "precision", ("FSDPPrecision", "bf16-mixed")),
    ],
    ids=["early", "swa", "precision"],
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
