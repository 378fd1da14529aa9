"""Layers that ranks share, with sequences that others share: equal to the plain Trainer."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader

from lightning_cp.diagnostics.trace import _Inside
from tests._harness.grid import rotated
from tests._harness.models import Case, Outcome, Text, fit, loaders, outcome, seeded, trainer_of
from tests._harness.rows import assert_same, trainer
from tests._harness.sharded import needs_sharding
from tests._harness.shared import (
    Distributed,
    LossInParts,
    SequenceInParts,
    ShardedByUser,
    Shareable,
    SharedByUser,
    plan,
    share,
)

pytestmark = [pytest.mark.dist, needs_sharding]

CLIPPED = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)
FIVE = Case(samples=20, precision="64-true", momentum=0.9, kv_heads=2, trainer=CLIPPED)
TWICE = replace(FIVE, samples=40)
TP2 = {"tensor_parallel_size": 2, "context_parallel_size": 2}

WAYS: dict[str, tuple[type[Shareable], dict[str, Any]]] = {
    "plan": (Shareable, {"tensor_parallel_plan": plan()}),
    "function": (Shareable, {"tensor_parallel_plan": share}),
    "configure_model": (SharedByUser, {}),
    "distributed-heads": (Distributed, {}),
    "loss-parallel": (LossInParts, {}),
    "sequence-parallel": (SequenceInParts, {}),
}


@pytest.mark.parametrize(("way", "stage"), rotated(WAYS, [(3,), (2,), (1,)], rare=["function"]))
def test_five_steps(way, stage, pool):
    kind, options = WAYS[way]
    check(kind, FIVE, {**TP2, **options, "zero_stage": stage}, pool, world=4)


def test_module_for_the_strategy_of_lightning(pool):
    """Nothing but the strategy changes: layers and parameters are cut in configure_model."""
    check(ShardedByUser, FIVE, TP2, pool, world=4)


def test_one_rank(pool):
    """A configure_model for several ranks finds a mesh of one."""
    options = {"tensor_parallel_size": 1, "zero_stage": 3}
    check(ShardedByUser, FIVE, options, pool, world=1)


def test_ranks_that_share_layers_only(pool):
    options = {**TP2, "context_parallel_size": 1, "zero_stage": 3, "tensor_parallel_plan": plan()}
    check(Shareable, FIVE, options, pool, world=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tp", "replicas", "stage"), [(2, 1, 3), (2, 1, 1), (2, 2, 3), (2, 2, 1), (1, 2, 3), (1, 2, 2)]
)
def test_eight_ranks(tp, replicas, stage, pool):
    """With dp2 x cp2 x tp2, that as two replicas, and two replicas of dp2 x cp2."""
    options = {**TP2, "tensor_parallel_size": tp, "data_parallel_replicate_size": replicas}
    options |= {"zero_stage": stage}
    if tp == 2:
        options["tensor_parallel_plan"] = plan()
    dp = 4 // tp
    check(Shareable, replace(FIVE, samples=20 * dp), options, pool, world=8, dp=dp)


class Recorder(_Inside):
    """Names of the groups of all collective calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[str] = []

    def _look(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        if func.namespace == "c10d":
            boxed = [x for x in args if isinstance(x, torch.ScriptObject)]
            groups = [x for x in boxed if "ProcessGroup" in str(x._type())]
            self.groups += [dist.ProcessGroup.unbox(x).group_name for x in groups]
        elif func.namespace == "_c10d_functional" and len(args) > 1:
            self.groups.append(args[-1])


class Recorded(SharedByUser):
    """Remembers whose messages a step sends, by role."""

    def training_step(self, batch: Any, index: int) -> Any:
        with Recorder() as recorder:
            loss = super().training_step(batch, index)
        self.forward_roles = self.roles(recorder)
        return loss

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        with Recorder() as recorder:
            super().backward(loss, *args, **kwargs)
        self.backward_roles = self.roles(recorder)

    def roles(self, recorder: Recorder) -> list[str]:
        mesh, parts = self.trainer.strategy._mesh, self.device_mesh
        groups = {name: getattr(mesh, name) for name in ("cp", "meta", "grad", "dp", "device")}
        for name in ("data_parallel_replicate", "data_parallel", "tensor_parallel"):
            groups[name] = parts[name].get_group()
        names = {group.group_name: name for name, group in groups.items()}
        assert len(names) == len(groups)
        assert dist.group.WORLD.group_name not in names
        return [names[name] for name in recorder.groups]


def record(rank: int, world: int) -> tuple[list[str], list[str]]:
    case = replace(FIVE, samples=2)
    model = seeded(case, kind=Recorded)
    options = {**TP2, "zero_stage": 3, "exchange": "allgather"}
    trainer_of(rank, world, case, options).fit(model, *loaders(case))
    return model.forward_roles, model.backward_roles


def test_order_of_messages(pool):
    """Every role has a group of its own, and all ranks send in one order."""
    found = pool.run(record, world=4)
    assert all(one == found[0] for one in found)
    forward, backward = ([x for x in each if x != "meta"] for each in found[0])
    assert set(forward) == set(backward) == {"cp", "data_parallel", "tensor_parallel"}
    short = {"cp": "c", "tensor_parallel": "t"}
    in_order = ["".join(short.get(x, "") for x in each) for each in (forward, backward)]
    # In a block: keys and values, the sum of the output layer, that of the MLP. Then the head and
    # the loss. Backward: scores, MLP, keys and values, and what q, k and v had as input.
    assert re.fullmatch(r"(c+t{2}){2}tc+", in_order[0]), in_order
    assert re.fullmatch(r"c*t(tc+t{3}){2}", in_order[1]), in_order


class Apart(Shareable):
    """Ranks that share layers read other samples."""

    def train_dataloader(self) -> Any:
        seed = torch.Generator().manual_seed(self.trainer.global_rank % 2)
        return DataLoader(Text(self.case, 8), batch_size=2, shuffle=True, generator=seed)


def fit_refused(rank: int, world: int, kind: type[Shareable], options: dict[str, Any]) -> None:
    case = replace(FIVE, kv_heads=1) if kind is Distributed else FIVE
    model = seeded(case, kind=kind)
    run = trainer_of(rank, world, case, {**TP2, **options})
    data = (None,) if kind is Apart else loaders(case)
    run.fit(model, *data)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (Shareable, {"tensor_parallel_plan": plan()}, "ConfigError", "zero_stage=1, 2 or 3, or"),
        (Shareable, {"zero_stage": 3}, "ConfigError", "no layer is shared"),
        (
            Shareable,
            {"zero_stage": 3, "tensor_parallel_plan": {"net.nothing": ColwiseParallel()}},
            "ConfigError",
            "no layer is shared",
        ),
        (Distributed, {"zero_stage": 3}, "RefusedError", "1 key heads do not divide by the 2"),
        (
            Apart,
            {"zero_stage": 3, "tensor_parallel_plan": plan()},
            "MismatchError",
            "ranks 0 and 1 share layers (tensor_parallel_size=2), but their batches differ",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Parallelize plan key")
def test_refused(kind, options, error, message, pool):
    for failure in pool.failures(fit_refused, kind, options, world=4):
        assert failure.kind == error, failure.trace
        assert message in failure.message


@pytest.mark.full
def test_verified_run(pool):
    options = {**TP2, "zero_stage": 3, "tensor_parallel_plan": plan(), "verify": "first_batch"}
    check(Shareable, FIVE, options, pool, world=4)


def save(rank: int, world: int, folder: Path, distributed: bool) -> Outcome:
    case = replace(FIVE, epochs=1)
    model = seeded(case, kind=SharedByUser)
    options = {**TP2, "zero_stage": 2, "save_distributed_checkpoint": distributed}
    run = trainer_of(rank, world, case, options)
    run.fit(model, *loaders(case))
    run.save_checkpoint(folder / "last.ckpt")
    return outcome(run, model)


def go_on(rank: int, world: int, options: dict[str, Any] | None, file: Path) -> Outcome:
    case = replace(FIVE, epochs=2)
    model = seeded(case, kind=SharedByUser)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(1)
    run = trainer_of(rank, world, case, options)
    run.fit(model, *loaders(case), ckpt_path=file)
    return outcome(run, model)


@pytest.mark.full  # tests/dist/test_resharding.py has such meshes
@pytest.mark.parametrize("distributed", [False, True])
def test_checkpoint_holds_no_trace_of_the_mesh(distributed, pool, tmp_path):
    saved = pool.run(save, tmp_path, distributed, world=4)[0]
    two = replace(FIVE, epochs=2)
    (expected,) = pool.run(fit, two, None, SharedByUser, world=1)
    meshes: list[tuple[int, Any]] = [(4, {**TP2, "zero_stage": 3}), (2, {"zero_stage": 3})]
    if not distributed:
        state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
        for name, value in state.items():
            assert type(value) is torch.Tensor
            assert np.array_equal(value.numpy(), saved.parameters[name]), name
        meshes.append((1, None))
    for world, options in meshes:
        for found in pool.run(go_on, options, tmp_path / "last.ckpt", world=world):
            for name, value in expected.parameters.items():
                assert np.abs(found.parameters[name] - value).max() <= 1e-6, (world, name)


def check(
    kind: type[Shareable],
    case: Case,
    options: dict[str, Any],
    pool: Any,
    *,
    world: int,
    dp: int = 1,
) -> None:
    expected = pool.run(fit, case, None, kind, world=dp)
    for rank, found in enumerate(pool.run(fit, case, options, kind, world=world, timeout=100)):
        one = expected[rank * dp // world]
        assert_same(found, one, 1e-11, where=f"rank {rank}")
