"""Context parallelism over the ranks of a task of the pool, without Lightning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.api import ContextParallel
from lightning_cp.config import Config


@contextmanager
def parallel(rank: int, world: int, **options: Any) -> Iterator[ContextParallel]:
    """Context parallelism over all ranks, removed at the end.

    Args:
        rank: rank of this process.
        world: number of ranks.
        options: of `Config`.
    """
    found = ContextParallel(
        dist.group.WORLD,
        meta=dist.new_group(backend="gloo"),
        rank=rank,
        world=world,
        config=Config(**options),
    )
    try:
        yield found
    finally:
        found.close()


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
