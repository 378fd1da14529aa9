"""`self.log` inside a step under context parallelism, and sums over virtual devices."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.api import ContextParallel, Shard
from lightning_cp.data.containers import items, rebuilt
from lightning_cp.data.valid import valid_tokens
from lightning_cp.errors import RefusedError
from lightning_cp.logs import Agreement, Logged, is_integer, reduction_of


class Call(NamedTuple):
    """One `self.log` that waits for the end of its step.

    Attributes:
        arguments: what it was called with.
        logged: the value and what is to become of it.
        dtype: default dtype of the step, in which numbers are logged.
    """

    arguments: inspect.BoundArguments
    logged: Logged
    dtype: torch.dtype


class StepLogs:
    """Makes the scalars that steps log those of the whole group.

    While a step runs its `self.log` calls are collected; when it has returned, they are compared
    and reduced over the group, and the module's own `log` gets the outcome. Metrics, values of
    `rank_zero_only=True`, calls in hooks that run within a step, and what `log` will refuse pass
    through at once.

    Args:
        parallel: the group.
        say: is told in words, once for every name, that a value is reduced.
    """

    def __init__(self, parallel: ContextParallel, say: Callable[[str], None]) -> None:
        self._rank = parallel.rank
        self._agreement = Agreement(
            group=parallel.meta, rank=parallel.rank, world=parallel.world, say=say
        )

    @contextmanager
    def step(self, module: Any, shard: Shard) -> Iterator[None]:
        """Collect what the step inside logs, and log it at the end.

        Args:
            module: the LightningModule.
            shard: what the step runs on.

        Raises:
            MismatchError: on every rank, if the ranks log different names.
            RefusedError: on every rank, if a mean needs weights that the batch does not give.
        """
        calls: list[Call] = []
        log, hook = module.log, getattr(module, "_current_fx_name", None)
        signature = inspect.signature(log)
        before = vars(module).get("log")

        def collect(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            logged = _logged(bound.arguments)
            if logged is None or getattr(module, "_current_fx_name", None) != hook:
                log(*args, **kwargs)
            else:
                calls.append(Call(bound, logged, torch.get_default_dtype()))

        vars(module)["log"] = collect
        try:
            yield
        finally:
            del vars(module)["log"]
            if before is not None:
                vars(module)["log"] = before
        self._finish(log, module, shard, calls)

    def _finish(
        self, log: Callable[..., None], module: Any, shard: Shard, calls: list[Call]
    ) -> None:
        reduced = self._agreement.reduce([x.logged for x in calls], self._weight(shard, calls))
        with _whole_batch(module, shard):
            for (bound, logged, dtype), (value, size) in zip(calls, reduced, strict=True):
                if value is not None:
                    bound.arguments["value"] = _like(logged.value, value, logged.kind, dtype)
                if size is not None:
                    bound.arguments["batch_size"] = int(size) if size == int(size) else size
                with _default_dtype(dtype):
                    log(*bound.args, **bound.kwargs)

    def _weight(self, shard: Shard, calls: list[Call]) -> float:
        """Tokens of this rank that count; NaN where that is unknown, or not asked for."""
        if not calls:
            return math.nan
        try:
            return valid_tokens(shard.cut, rank=self._rank)
        except RefusedError:
            return math.nan  # refused where a mean needs it


def _logged(arguments: dict[str, Any]) -> Logged | None:
    """What a call of `log` is about; None where it is to pass through."""
    value, name = arguments.get("value"), arguments.get("name")
    kind = reduction_of(arguments.get("reduce_fx", "mean"))
    if kind is None or arguments.get("rank_zero_only", False):
        return None
    if not isinstance(value, Tensor | int | float):
        return None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        if not arguments.get("enable_graph", False):
            value = arguments["value"] = value.detach().clone()
    return Logged(str(name), value, kind, arguments.get("batch_size"))


def _like(before: Tensor | float, value: float, kind: str, default: torch.dtype) -> Tensor | float:
    """A reduced value as the step would have given it; a mean of integers is no integer."""
    if not isinstance(before, Tensor):
        return int(value) if is_integer(before) and value == int(value) else value
    dtype = default if is_integer(before) and kind == "mean" else before.dtype
    return torch.tensor(value, dtype=dtype, device=before.device)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _whole_batch(module: Any, shard: Shard) -> Iterator[None]:
    """Let the Trainer read the number of rows off the whole batch, where a cut could change it.

    That is where the sequence comes first: what it reads then is the size of dim 0.
    """
    results = getattr(module.trainer, "_results", None)
    dims = shard.cut.dims
    if results is None or 0 not in dims.values():
        yield
        return
    values = items(shard.batch)
    for fields in shard.cut.fields.values():
        for name, dim in fields.dims.items():
            shape = list(values[name].shape)
            shape[dim] = fields.length
            values[name] = torch.empty(shape, dtype=values[name].dtype, device="meta")
    before, results.batch = results.batch, rebuilt(shard.batch, values)
    try:
        yield
    finally:
        results.batch = before
