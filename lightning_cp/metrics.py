"""Metrics of torchmetrics: over whole sequences where they were fed with local tokens.

[Note: tokens or rows] Whether a metric is fed with a rank's own tokens or with what peers share is
read off its updates and never off its states: every update leaves three numbers about its inputs,
and before states are put together the ranks of a group compare them. Equal in all updates: each
virtual device counts once. Different in all: every rank counts.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_cp.comm.reduce import sum_
from lightning_cp.errors import MismatchError

CLOSE = 1e-6
"""Relative difference that rounding explains between inputs that are the same."""

METHODS = ("update", "forward", "reset", "sync", "unsync")
"""What is replaced on every metric."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where a rank stands.

    Attributes:
        cp: process group of the ranks that share each sequence.
        dp: one rank of every virtual device.
        meta: CPU group of the ranks of `cp`.
        rank: rank within `cp`.
        world: size of `cp`.
        devices: size of `dp`.
    """

    cp: Any
    dp: Any
    meta: Any
    rank: int
    world: int
    devices: int


class GroupMetrics:
    """Gives the metrics of a module the values they have on one device, until `remove`.

    Metrics with a process group or a gathering function of the user's are left alone.

    Args:
        module: the root module.
        groups: where this rank stands.
    """

    def __init__(self, module: nn.Module, groups: Groups) -> None:
        self._metrics = [
            _Watched(part, name, groups)
            for name, part in module.named_modules()
            if isinstance(part, Metric) and part.process_group is None and part.dist_sync_fn is None
        ]

    def remove(self) -> None:
        """Take the metrics back to what they were."""
        for metric in self._metrics:
            metric.remove()
        self._metrics = []


class _Watched:
    """One metric: remembers what it was fed with, and decides whose states are put together.

    The memory is an attribute of the metric, so that who puts those back puts it back as well.
    """

    def __init__(self, metric: Metric, name: str, groups: Groups) -> None:
        self._metric, self._name, self._groups = metric, name, groups
        self._per_token: bool | None = None
        self._forwarding = False
        self._is_copy = False
        self._before = {name: vars(metric).get(name) for name in METHODS}
        self._original: dict[str, Callable[..., Any]] = {x: getattr(metric, x) for x in METHODS}
        self._fed: list[Tensor] = []
        object.__setattr__(metric, "_context_parallel_inputs", self._fed)
        for method in METHODS:
            object.__setattr__(metric, method, getattr(self, method))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Watched":
        """Watches a copy of the metric, which is not complete yet; see `_watch_copy`."""
        copied = object.__new__(_Watched)
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        copied._metric, copied._fed = memo[id(self._metric)], []
        copied._is_copy = True
        return copied

    def _watch_copy(self) -> None:
        """Finish watching a copy, once it is there."""
        if not self._is_copy:
            return
        self._is_copy = False
        metric = self._metric
        bound = {x: getattr(type(metric), x).__get__(metric) for x in METHODS}
        self._original = bound | {"update": metric.update}
        object.__setattr__(metric, "_context_parallel_inputs", self._fed)
        object.__setattr__(metric, "update", self.update)

    def remove(self) -> None:
        """Put the methods back."""
        for name, method in self._before.items():
            if method is None:
                object.__delattr__(self._metric, name)
            else:
                object.__setattr__(self._metric, name, method)
        object.__delattr__(self._metric, "_context_parallel_inputs")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The metric's update; the inputs leave their numbers."""
        if not self._forwarding:
            self._fed.append(fingerprint(args, kwargs))
        return self._original["update"](*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The metric's forward: its value is that of the group's tokens."""
        self._watch_copy()
        self._fed.append(fingerprint(args, kwargs))
        self._forwarding = True
        try:
            return self._original["forward"](*args, **kwargs)
        finally:
            self._forwarding = False

    def reset(self) -> None:
        """The metric's reset."""
        self._watch_copy()
        if not self._forwarding:
            self._fed.clear()
        self._original["reset"]()

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """The metric's sync, over the ranks that count; every rank calls.

        Raises:
            MismatchError: on every rank of the group, if updates of both kinds were mixed.
        """
        self._watch_copy()

        def original(group: Any, wanted: bool) -> None:
            self._original["sync"](dist_sync_fn, group, wanted, distributed_available)

        within_forward = self._forwarding and not should_sync
        if process_group is not None or (not should_sync and not within_forward):
            original(process_group, should_sync)
            return
        per_token = self._decide(self._fed[-1:] if self._forwarding else self._fed)
        groups = self._groups
        if within_forward:
            original(groups.cp, per_token)
        elif per_token:
            original(None, True)
        else:
            original(groups.dp, groups.devices > 1)

    def unsync(self, should_unsync: bool = True) -> None:
        """The metric's unsync; states that a forward put together are taken apart again."""
        self._watch_copy()
        once = self._forwarding and self._metric._is_synced
        self._original["unsync"](should_unsync or once)

    def _decide(self, fed: list[Tensor]) -> bool:
        """Whether inputs differ between peers; what was decided before where there are none."""
        groups = self._groups
        own = torch.stack(fed).cpu() if fed else torch.zeros(0, 3, dtype=torch.float64)
        counts = torch.zeros(groups.world, dtype=torch.float64)
        counts[groups.rank] = len(own)
        sum_(counts, group=groups.meta)
        if not (counts == counts[0]).all():
            raise MismatchError(
                f"metric '{self._name}' ({type(self._metric).__name__}) was updated "
                f"{counts.int().tolist()} times on the ranks of one context-parallel group; update "
                f"it on every rank in every step, with no elements where a rank has none"
            )
        if not len(own):
            return self._per_token is not False
        table = torch.zeros(groups.world, *own.shape, dtype=torch.float64)
        table[groups.rank] = own
        sum_(table, group=groups.meta)
        equal = _equal(table)
        if equal.any() and not equal.all():
            raise MismatchError(
                f"metric '{self._name}' ({type(self._metric).__name__}) was fed with values that "
                f"are equal on the ranks of one context-parallel group in {int(equal.sum())} "
                f"updates and differ in {int((~equal).sum())}: how often each counts is then "
                f"undefined; use one metric for values of local tokens and another one for values "
                f"of the whole sequence, or give it a process_group"
            )
        self._per_token = not bool(equal.all())
        return self._per_token


def fingerprint(args: Any, kwargs: Any) -> Tensor:
    """Three numbers about inputs: their structure, their integers and their other numbers.

    Args:
        args: positional arguments.
        kwargs: arguments by name.

    Returns:
        `[3]` in double, on the device of the first tensor; nothing waits for it.
    """
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    words = [f"{x.dtype}{tuple(x.shape)}" if isinstance(x, Tensor) else _word(x) for x in leaves]
    whole = torch.zeros((), dtype=torch.float64, device=device)
    real = torch.zeros((), dtype=torch.float64, device=device)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            total = _weighed(leaf.detach()).to(device)
            if leaf.is_floating_point() or leaf.is_complex():
                real = real + (place + 1) * total
            else:
                whole = whole + (place + 1) * total
        elif isinstance(leaf, float):
            real = real + (place + 1) * leaf
    code = torch.tensor(float(zlib.crc32(repr(words).encode())), dtype=torch.float64)
    return torch.stack([code.to(device), whole, real])


def _word(value: Any) -> str:
    """What must be the same of a value that is no tensor; floats may differ by rounding."""
    return "float" if isinstance(value, float) else repr(value)


def _weighed(tensor: Tensor) -> Tensor:
    """A sum over elements, each with a weight that tells its place."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if values.ndim > 1:
        values = values.sum(-1, dtype=torch.float64)
    values = values.reshape(-1).to(torch.float64)
    weights = 1 + torch.arange(len(values), dtype=torch.float64, device=values.device).sqrt()
    return (values * weights).sum()


def _equal(table: Tensor) -> Tensor:
    """Which updates are equal on all ranks, of `[ranks, updates, 3]`; NaN is like NaN."""
    first = table[:1].expand_as(table)
    same = (table == first) | (table.isnan() & first.isnan())
    close = torch.isclose(table, first, rtol=CLOSE, atol=0.0, equal_nan=True)
    found: Tensor = (torch.cat([same[..., :2], close[..., 2:]], -1)).all(-1).all(0)
    return found
