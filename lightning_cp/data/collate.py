"""Cutting batches where they are made: in the processes that load data."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_cp.data.containers import items, rebuilt
from lightning_cp.data.content import content_code, shapes_of
from lightning_cp.data.cut import Cut, Rules, cut
from lightning_cp.errors import BatchError


class Share(NamedTuple):
    """How one rank cuts, in values that another process can have.

    Attributes:
        rules: how batches are cut.
        rank: rank within the context-parallel group.
        world: size of the group.
    """

    rules: Rules
    rank: int
    world: int


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
    """

    __slots__ = ("code", "layout", "part", "rank", "shapes", "world")
    part: Cut
    layout: str
    rank: int
    world: int
    code: int
    shapes: str

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
        return self.mapped(Tensor.pin_memory)

    def to(self, device: Any, **options: Any) -> "ShardedBatch":
        """The same with tensors on a device; the Trainer calls this.

        Args:
            device: where to.
            options: of `torch.Tensor.to`.
        """
        return self.mapped(lambda tensor: tensor.to(device, **options))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "ShardedBatch":
        """The same with a function applied to every tensor of the cut batch."""
        values = items(self.batch)
        new = {name: function(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        part = dataclasses.replace(self.part, batch=rebuilt(self.batch, new))
        return ShardedBatch(part, **self._facts())

    def _facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "part"}


def sharded(batch: Any, part: Cut, share: Share, *, code: int | None = None) -> ShardedBatch:
    """A cut batch with what peers compare.

    Args:
        batch: the whole batch.
        part: what `cut` made of it.
        share: how.
        code: `content_code(batch)` where it is known already.
    """
    return ShardedBatch(
        part,
        layout=part.layout,
        rank=share.rank,
        world=share.world,
        code=content_code(batch) if code is None else code,
        shapes=shapes_of(batch),
    )


def _remade(part: Cut, facts: dict[str, Any]) -> ShardedBatch:
    return ShardedBatch(part, **facts)


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
        batch, share = self._collate(samples), self._share
        if share is None:
            return batch
        return sharded(batch, cut(batch, share.rules, rank=share.rank, world=share.world), share)
