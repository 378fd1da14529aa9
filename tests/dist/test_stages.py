"""Every stage of sharding, with replicas: whole runs equal those of the plain Trainer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.compat import ranks_of
from tests._harness.grid import named, rare, rotated
from tests._harness.models import Case, LanguageModel, fit, loaders, seeded, trainer_of
from tests._harness.rows import TRAINING, Row, assert_same, check, trainer
from tests._harness.sharded import needs_sharding

pytestmark = [pytest.mark.dist, needs_sharding]

CLIPPED = trainer(accumulate_grad_batches=2, gradient_clip_val=0.1)
FIVE = Case(samples=20, trainer=CLIPPED)
REPLICAS = {"data_parallel_replicate_size": 2}

MESHES = [
    Row("cp2", FIVE, {}),
    Row("cp4", FIVE, {}, cp=4),
    Row("dp2-cp2", replace(FIVE, samples=40), {}, 2, 2),
    Row("replicate2-cp2", replace(FIVE, samples=40), REPLICAS, 2, 2),
    Row("replicate2-cp1", replace(FIVE, samples=40), REPLICAS, 2, 1),
]
STAGES = [(1,), (2,), (3,)]


class Adam(LanguageModel):
    """With the optimizer that most use, and its weight decay."""

    kernel = "foreach"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kernel = {self.kernel: True}
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, **kernel)


class Fused(Adam):
    """One kernel for all parameters."""

    kernel = "fused"


@pytest.mark.parametrize(("row", "stage"), rotated(MESHES, STAGES), ids=named)
def test_five_steps(row, stage, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=stage)


@pytest.mark.parametrize(
    ("row", "kind", "stage"),
    rotated(MESHES[:4], [(Adam, 1), (Adam, 2), (Fused, 3), (Fused, 1)], rare=MESHES[1:3]),
    ids=named,
)
def test_adam(row, kind, stage, pool):
    case = replace(row.case, precision="64-true")
    expected = pool.run(fit, case, None, kind, world=row.dp)
    options = {"context_parallel_size": row.cp, "zero_stage": stage, **row.options}
    found = pool.run(fit, case, options, kind, world=row.dp * row.cp)
    for rank, one in enumerate(found):
        assert_same(one, expected[rank // row.cp], 1e-9, where=f"rank {rank}")


@pytest.mark.parametrize(("row", "stage"), rotated(TRAINING, STAGES[:2]), ids=named)
def test_ways_to_train(row, stage, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=stage)


@pytest.mark.parametrize("row", rare([MESHES[0], MESHES[3]], [MESHES[3]]), ids=named)
@pytest.mark.parametrize("kept", ["whole", "parts"])
def test_gradients_are_accumulated_either_way(kept, row, pool, plain):
    check(row, pool, plain, "64-true", zero_stage=3, accumulate_gradients=kept)


class Counting(TorchDispatchMode):
    """Counts collectives by what they do and how many ranks take part."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name.startswith("c10d::"):
            groups = [x for x in args if isinstance(x, torch.ScriptObject) and is_group(x)]
            self.seen += [(name.removeprefix("c10d::"), len(ranks_of(x))) for x in groups]
        return func(*args, **(kwargs or {}))


def is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


class Watched(LanguageModel):
    """Says what travels in the backwards, and in which form gradients wait."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.travelled: list[list[tuple[str, int]]] = []
        self.waiting: list[bool] = []

    def backward(self, loss, *args: Any, **kwargs: Any) -> None:
        with Counting() as counting:
            super().backward(loss, *args, **kwargs)
        self.travelled.append(counting.seen)

    def on_after_backward(self) -> None:
        grads = [x.grad for x in self.parameters()]
        self.waiting.append(all(isinstance(x, DTensor) for x in grads))


def watch(rank: int, world: int, options: dict[str, Any]) -> tuple[Any, Any]:
    case = replace(FIVE, samples=8)
    model = seeded(case, kind=Watched)
    trainer_of(rank, world, case, options).fit(model, *loaders(case))
    return model.travelled, model.waiting


def reductions(seen: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [x for x in seen if x[0].startswith(("reduce_scatter", "_reduce_scatter", "allreduce"))]


@pytest.mark.parametrize(
    ("stage", "replicas", "first", "second"),
    [
        (1, 1, set(), {"scatter"}),
        (2, 1, {"scatter"}, {"scatter"}),
        (3, 1, {"scatter"}, {"scatter"}),
        (1, 2, set(), {"scatter", "allreduce"}),
        (2, 2, {"scatter"}, {"scatter", "allreduce"}),
    ],
)
def test_what_accumulation_sends(stage, replicas, first, second, pool):
    options = {"zero_stage": stage, "data_parallel_replicate_size": replicas}
    options |= {"context_parallel_size": 2, "exchange": "ring"}
    for travelled, waiting in pool.run(watch, options, world=2 * replicas):
        kinds = [
            {"allreduce" if "allreduce" in name else "scatter" for name, _ in reductions(seen)}
            for seen in travelled
        ]
        assert kinds == [first, second] * (len(kinds) // 2), travelled
        in_parts = stage > 1 and replicas == 1  # between replicas a sum waits within FSDP
        assert waiting[:2] == [in_parts, True]


class Counted(LanguageModel):
    """Counts the bytes of what it trains, on this rank and in all."""

    kind = torch.optim.AdamW

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
        tensors = [*self.parameters(), *(x.grad for x in self.parameters()), *states]
        sharded = [x for x in tensors if isinstance(x, DTensor)]
        assert len(sharded) == len(tensors)
        self.held = sum(x.to_local().nbytes for x in sharded), sum(x.nbytes for x in sharded)


def count(rank: int, world: int, options: dict[str, Any]) -> tuple[int, int]:
    case = Case(samples=4, heads=12, kv_heads=12)
    model = seeded(case, kind=Counted)
    trainer_of(rank, world, case, options).fit(model, *loaders(case))
    return model.held


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_bytes_of_a_rank(world, replicas, pool):
    options = {"zero_stage": 3, "data_parallel_replicate_size": replicas}
    options["context_parallel_size"] = 2 if replicas == 2 else world
    for held, whole in pool.run(count, options, world=world):
        assert held <= 1.05 * whole * replicas / world, (held, whole)
