"""Cutting batches where they are made: in the processes that load data."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from lightning_cp.context import mask_of
from lightning_cp.data.containers import items, rebuilt
from lightning_cp.data.content import content_code, shapes_of
from lightning_cp.data.cut import Cut, Rules, cut
from lightning_cp.errors import BatchError
from lightning_cp.mask import Visibility
from lightning_cp.plan import Plan, PlanKey, Schedule
from lightning_cp.sequences import Sequence, plan_key

Pairs = tuple[tuple[str, str], ...]
"""Names of the sequences of queries and keys that attention is between."""


class Share(NamedTuple):
    """How one rank cuts, in values that another process can have.

    Attributes:
        rules: how batches are cut.
        rank: rank within the context-parallel group.
        world: size of the group.
        calls: what the attention calls that are expected ask to see, each with the names of the
            sequences of its queries and its keys; the first sequence where there are none.
    """

    rules: Rules
    rank: int
    world: int
    calls: tuple[tuple[Visibility, Pairs], ...] = ((Visibility(), ()),)


class Sharing(Protocol):
    """What knows how its rank cuts: a strategy, or a `ContextParallel`."""

    def share(self, module: torch.nn.Module | None = None) -> Share | None: ...


class ShardedBatch:
    """One rank's part of a batch, with all that its peers compare; nothing cuts it again.

    It cannot be changed. The step gets the batch that is inside, cut.

    Args:
        part: the cut batch and the facts about it.
        layout: name of the layout.
        rank: the rank that it was cut for.
        world: the number of ranks that it was cut for.
        code: `content_code` of the whole batch.
        shapes: `shapes_of` the whole batch.
        plans: of the attention calls that are expected, where a worker made them.
    """

    __slots__ = ("code", "layout", "part", "plans", "rank", "shapes", "world")
    part: Cut
    layout: str
    rank: int
    world: int
    code: int
    shapes: str
    plans: dict[PlanKey, Plan]

    def __init__(self, part: Cut, **facts: Any) -> None:
        for name, value in {"part": part, **facts}.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a ShardedBatch cannot be changed; {name} stays as it is")

    def __reduce__(self) -> Any:
        """A copy in another process."""
        return _remade, (self.part, self._facts())

    @property
    def batch(self) -> Any:
        """The cut batch, of the type that the collate function made."""
        return self.part.batch

    def check(self, *, rank: int, world: int) -> None:
        """Whether it was cut for this rank.

        Raises:
            BatchError: if it was not.
        """
        if (self.rank, self.world) != (rank, world):
            raise BatchError(
                f"this batch was cut for rank {self.rank} of {self.world}, and arrived on rank "
                f"{rank} of {world} of a context-parallel group; make the ContextParallelCollate "
                f"with this run's strategy, in train_dataloader()"
            )

    def pin_memory(self) -> "ShardedBatch":
        """The same with pinned tensors; the DataLoader calls this."""
        return self.mapped(lambda value: value.pin_memory() if _can(value, "pin_memory") else value)

    def to(self, device: Any, **options: Any) -> "ShardedBatch":
        """The same with its values on a device; the Trainer calls this.

        What is no container and has a method `to` moves, as in a batch that the Trainer moves.

        Args:
            device: where to.
            options: of `torch.Tensor.to`; to an accelerator, tensors are copied without waiting.
        """
        waits = torch.device(device).type in ("cpu", "mps")
        return self.mapped(partial(_moved, device, {"non_blocking": not waits, **options}))

    def mapped(self, function: Callable[[Any], Any]) -> "ShardedBatch":
        """The same with a function applied to every value of the cut batch, tensor or not."""
        new = {name: function(value) for name, value in items(self.batch).items()}
        part = dataclasses.replace(self.part, batch=rebuilt(self.batch, new))
        return ShardedBatch(part, **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "part"}


class Uncut:
    """In place of a batch that could not be cut; every rank learns why where it arrives.

    Args:
        reason: what is wrong with it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


def sharded(
    batch: Any,
    part: Cut,
    share: Share,
    *,
    code: int | None = None,
    plans: dict[PlanKey, Plan] | None = None,
) -> ShardedBatch:
    """A cut batch with what peers compare.

    Args:
        batch: the whole batch.
        part: what `cut` made of it.
        share: how.
        code: `content_code(batch)` where it is known already.
        plans: see `planned`.
    """
    return ShardedBatch(
        part,
        layout=part.layout,
        rank=share.rank,
        world=share.world,
        code=content_code(batch) if code is None else code,
        shapes=shapes_of(batch),
        plans=plans or {},
    )


def planned(
    sequences: Mapping[str, Sequence], share: Share, exchange: str | Schedule
) -> dict[PlanKey, Plan]:
    """The plans of the attention calls that are expected on a batch, by what they are found by.

    Args:
        sequences: of the batch.
        share: how the batch was cut, and which calls are expected.
        exchange: how keys and values travel.
    """
    main = next(iter(sequences))
    keys = []
    for sees, pairs in share.calls:
        for names in pairs or ((main, main),):
            if sequences.keys() >= set(names):
                q, kv = (sequences[name] for name in names)
                mask = mask_of(q, kv, sees)
                keys.append(plan_key(q, kv, mask, rank=share.rank, exchange=exchange))
    return {key: key.build() for key in keys}


def _remade(part: Cut, facts: dict[str, Any]) -> ShardedBatch:
    return ShardedBatch(part, **facts)


def _can(value: Any, method: str) -> bool:
    return callable(getattr(value, method, None))


def _moved(device: Any, options: dict[str, Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, **options)
    moved = value.to(device) if _can(value, "to") else None
    return value if moved is None else moved


def _part(batch: Any, share: Share | None) -> Any:
    """This rank's part of a whole batch; the batch itself where nothing is cut, or it was before.

    Raises:
        BatchError: if the batch cannot be cut.
    """
    if share is None or isinstance(batch, ShardedBatch | Uncut):
        return batch
    part = cut(batch, share.rules, rank=share.rank, world=share.world)
    if get_worker_info() is None:
        return sharded(batch, part, share)
    part = dataclasses.replace(part, seconds=0.0)  # nobody waited for the layout
    plans = planned({**part.sequences, **part.whole}, share, part.exchange)
    return sharded(batch, part, share, plans=plans)


class ContextParallelCollate:
    """A collate function that cuts: only this rank's tokens leave the worker, and reach the device.

    Make it in `train_dataloader()` or later, when the sizes are known. Hooks that work on the batch
    before or after its transfer then see the cut batch inside a `ShardedBatch`. The layout "auto"
    is zigzag here, or balanced for packed rows, as for causal attention.

    Args:
        strategy: the Trainer's `ContextParallelStrategy`, or a `ContextParallel`.
        collate: makes a whole batch of samples; torch's default collate where not given.
        module: the model, to see whether it takes positions; the Trainer's where not given.

    Raises:
        RuntimeError: if the strategy does not know its sizes yet.
    """

    def __init__(
        self,
        strategy: Sharing,
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        module: torch.nn.Module | None = None,
    ) -> None:
        self._collate, self._share = collate, strategy.share(module)

    def __call__(self, samples: list[Any]) -> Any:
        """This rank's part of the batch; without context parallelism the batch itself.

        Raises:
            BatchError: if the batch cannot be cut.
        """
        return _part(self._collate(samples), self._share)


class WorkerCollate:
    """A loader's own collate function, and the cut after it.

    How to cut is asked when a batch is made, in the process that makes it: a loader has its collate
    function before that is known. A copy that is sent to a process has the answer of that moment.

    Args:
        collate: the loader's own; its attributes are found here too.
        share: says how to cut, None where batches stay whole.
    """

    def __init__(self, collate: Callable[[Any], Any], share: Callable[[], Share | None]) -> None:
        self.collate, self._share = collate, share

    def __call__(self, samples: Any) -> Any:
        """This rank's part of the batch, or why there is none."""
        batch = self.collate(samples)
        try:
            return _part(batch, self._share())
        except BatchError as error:
            return Uncut(str(error))

    def __getattr__(self, name: str) -> Any:
        if name == "collate":
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __reduce__(self) -> Any:
        """A copy in another process."""
        return WorkerCollate, (self.collate, partial(_given, self._share()))


def _given(share: Share | None) -> Share | None:
    return share
