"""Context parallelism over all ranks of a task of the pool, without Lightning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp import ContextParallel
from lightning_cp.config import Config
from lightning_cp.context import SLOT
from lightning_cp.mesh import build_mesh
from lightning_cp.topology import Topology


@contextmanager
def one_group(rank: int, world: int, **options: Any) -> Iterator[ContextParallel]:
    """All ranks as one group, given back at the end.

    Args:
        rank: rank of this process.
        world: number of ranks.
        options: of `Config`.
    """
    topology = Topology.resolve(world=world, local_world=world, cp=world, dp=1)
    mesh = build_mesh(topology, device=torch.device("cpu"))
    parallel = ContextParallel(
        mesh.cp,
        a2a=mesh.cp_a2a,
        meta=mesh.meta,
        rank=rank,
        world=world,
        config=Config(**options),
    )
    try:
        yield parallel
    finally:
        parallel.close()
        SLOT.forget(mesh.cp)
        mesh.close()


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
