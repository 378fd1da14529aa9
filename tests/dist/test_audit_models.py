"""The audit on whole models: planted faults are named on every rank, and nothing that is right."""

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.api import WATCHED, ContextParallel
from lightning_cp.errors import ContextParallelWarning
from tests._harness.faults import FAULTS, RIGHT, Planted
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.parts import Batch, Model, made, tokens
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

AUDITED = [case for case in FAULTS if case.audited and not case.warned]
WARNED = [case for case in FAULTS if case.warned]


def stepped(parallel: ContextParallel, case: Planted, stage: str, steps: int) -> list[float]:
    """Losses of some steps on one batch, with backwards."""
    model, found = case.make(), []
    for index in range(steps):
        shard = parallel.shard(case.batch(), module=model, stage=stage)
        with parallel.active(shard):
            loss = model.training_step(shard.batch, index)  # type: ignore[operator]
            loss.backward()
        parallel.check(shard, loss)
        found.append(loss.item())
    return found


def run_faults(rank: int, world: int, layout: str, cases: list[Planted]) -> list[str]:
    """What the first step of every model raised, with its type."""
    found = []
    with one_group(rank, world, layout=layout) as parallel:
        for case in cases:
            try:
                stepped(parallel, case, case.name, 1)
                found.append("nothing")
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def run_right(rank: int, world: int, layout: str) -> tuple[list[list[float]], list[str]]:
    """Losses of all watched steps and one more, and warnings."""
    recorded = warnings.catch_warnings(record=True)
    with one_group(rank, world, layout=layout) as parallel, recorded as caught:
        warnings.simplefilter("always")
        losses = [stepped(parallel, case, case.name, WATCHED + 1) for case in RIGHT]
    return losses, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), (2, "contiguous"), (3, "zigzag")])
def test_planted_faults_are_refused_on_every_rank(world: int, layout: str, pool: Pool) -> None:
    ranks = pool.run(run_faults, layout, AUDITED, world=world)
    for number, case in enumerate(AUDITED):
        for rank in range(world):
            message = ranks[rank][number]
            place = f"module '{case.module}' " if case.module else "the root module "
            kind, _, text = message.partition(": ")
            assert kind == "RefusedError", f"{case.name}: rank {rank}: {message}"
            assert text.startswith(place), f"{case.name}: rank {rank}: {message}"
            assert re.search(case.words, text), f"{case.name}: rank {rank}: {message}"


@pytest.mark.parametrize(("layout", "world"), rotated(("zigzag", "contiguous"), [(2,), (3,)]))
def test_right_models_pass_and_are_right(layout: str, world: int, pool: Pool) -> None:
    for rank, (losses, messages) in enumerate(pool.run(run_right, layout, world=world)):
        assert not messages, f"rank {rank}: {messages}"
        for case, found in zip(RIGHT, losses, strict=True):
            plain = case.make().training_step(case.batch(), 0).item()  # type: ignore[operator]
            for loss in found:
                difference = abs(loss - plain)
                assert difference < 1e-12 * max(1, plain), f"rank {rank}: {case.name}"


class Reduces(Model):
    """Logs something over ranks, in several ways; the loss stays as it is."""

    def __init__(self, how: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.how, self.group = how, None

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        for _ in range(2):
            self.how(loss.detach().clone(), self.group)
        return loss


def first_of(group: Any) -> int:
    return dist.get_global_rank(group, 0) if group else 0


def add(x: Tensor, group: Any) -> None:
    dist.all_reduce(x, group=group)


def gather(x: Tensor, group: Any) -> None:
    dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size(group))], x, group)


def functional_add(x: Tensor, group: Any) -> None:
    found = functional_collectives.all_reduce(x, "sum", group or dist.group.WORLD)
    assert float(found) > 0


def add_to_first(x: Tensor, group: Any) -> None:
    dist.reduce(x, first_of(group), group=group)


def wait_for_all(x: Tensor, group: Any) -> None:
    """Neither adds nor collects."""
    dist.barrier(group)
    dist.broadcast(x, first_of(group), group=group)


HOWS = {
    "all_reduce": add,
    "all_gather": gather,
    "all_reduce by the functional collective": functional_add,
    "reduce": add_to_first,
    "nothing": wait_for_all,
}


class Onlooker(TorchDispatchMode):
    """A mode of the user's: every operator is called by its line, not by torch's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def run_reductions(
    rank: int, world: int, own_group: bool, mode: type = nullcontext
) -> dict[str, list[tuple[str, str, int]]]:
    """Warnings of every way: message, file, line; over all ranks or a group of this one alone."""
    groups = [dist.new_group([r]) for r in range(world)]
    found = {}
    with one_group(rank, world, layout="zigzag") as parallel:
        for name, how in HOWS.items():
            model = made(Reduces, how)()
            model.group = groups[rank] if own_group else None  # type: ignore[assignment]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for index in range(2):
                    shard = parallel.shard(tokens(), module=model, stage=name)
                    with parallel.active(shard), mode():
                        model.training_step(shard.batch, index)  # type: ignore[operator]
            found[name] = [
                (str(w.message), w.filename, w.lineno)
                for w in caught
                if issubclass(w.category, ContextParallelWarning)
            ]
    return found


@pytest.mark.parametrize("mode", [nullcontext, Onlooker])
def test_collectives_of_the_models_own_are_warned_of_once_a_line(mode: type, pool: Pool) -> None:
    for found in pool.run(run_reductions, False, mode, world=2):
        for name, caught in found.items():
            assert len(caught) == (name != "nothing"), f"{name}: {caught}"
        for name, how in list(HOWS.items())[:-1]:
            message, file, line = found[name][0]
            code = how.__code__
            assert message.startswith("the root module (Reduces, test_audit_models.py:")
            assert f"torch.distributed.{name.split()[0]} over ranks of which 2 share" in message
            assert "counts each token 2 times" in message
            assert "functional.sequence_sum" in message
            assert "data_parallel_rank" in message
            assert (file, line) == (code.co_filename, code.co_firstlineno + 1)


def test_collectives_among_ranks_of_different_sequences_pass(pool: Pool) -> None:
    for found in pool.run(run_reductions, True, world=2):
        assert not any(found.values()), found


def run_warned(rank: int, world: int) -> list[str]:
    """Warnings of the planted fault, whose loss is then too large by the number of ranks."""
    case = WARNED[0]
    recorded = warnings.catch_warnings(record=True)
    with one_group(rank, world, layout="zigzag") as parallel, recorded as caught:
        warnings.simplefilter("always")
        losses = stepped(parallel, case, "train", 2)
    plain = float(case.make().training_step(case.batch(), 0).detach())  # type: ignore[operator]
    assert losses == pytest.approx([world * plain] * 2, rel=1e-12)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("world", [2, 3])
def test_the_double_reduction_is_warned_of_on_every_rank(world: int, pool: Pool) -> None:
    for messages in pool.run(run_warned, world=world):
        assert len(messages) == 2, messages  # the sum, and the number of tokens
        for message in messages:
            assert message.startswith("the root module (OwnReduce, faults.py:")
            assert re.search(WARNED[0].words, message)
            assert f"counts each token {world} times" in message


def test_the_lists_are_complete() -> None:
    assert len(FAULTS) == 15
    assert [case.name for case in FAULTS if not case.audited] == ["own-mean"]
    assert len({case.name for case in (*FAULTS, *RIGHT)}) == len(FAULTS) + len(RIGHT)
    for case in (*FAULTS, *RIGHT):
        model: nn.Module = case.make()
        assert case.module in dict(model.named_modules())
        loss = model.training_step(case.batch(), 0)  # type: ignore[operator]
        assert loss.dtype == torch.float64
