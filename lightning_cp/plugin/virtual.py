"""Collectives between virtual devices, in place of those between all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.logs import CLOSE
from lightning_cp.mesh import Mesh

REDUCTIONS = {
    "mean": lambda x: x.mean(0, dtype=None if x.is_floating_point() else torch.float64),
    "avg": lambda x: x.mean(0, dtype=None if x.is_floating_point() else torch.float64),
    "sum": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
}
"""How values that differ within a virtual device become its value."""


def reduces_over_devices(reduce_op: Any) -> bool:
    """Whether a reduction, a name or a `ReduceOp`, is one that `device_value` knows."""
    return _name(reduce_op) in REDUCTIONS


def device_value(tensor: Tensor, mesh: Mesh, reduce_op: Any) -> Tensor:
    """What a virtual device brings into a reduction over devices.

    Args:
        tensor: this rank's value; all ranks of a group pass the same shape and dtype.
        mesh: groups of this rank.
        reduce_op: "mean", "sum", "min" or "max", as a name or a `ReduceOp`.

    Returns:
        `tensor` where it is equal on all ranks of the device, else its reduction over them; the
        same on each of them.
    """
    own = tensor.detach().contiguous()
    peers = [torch.empty_like(own) for _ in range(mesh.topology.cp)]
    dist.all_gather(peers, own, group=mesh.cp)
    stacked, first = torch.stack(peers), peers[0]
    if torch.allclose(stacked, first.expand_as(stacked), rtol=_rtol(own), atol=0, equal_nan=True):
        return first
    found: Tensor = REDUCTIONS[_name(reduce_op)](stacked).to(own.dtype)
    return found


def gather_group(mesh: Mesh | None, group: Any) -> Any:
    """The group that a gather without a group of its own is over: one rank of every device.

    Args:
        mesh: groups of this rank, None where there is one rank.
        group: what the caller asked for; the default group counts as nothing asked for.
    """
    asked = group is not None and group is not dist.group.WORLD
    return group if asked or mesh is None else mesh.dp


def _name(reduce_op: Any) -> str:
    return str(getattr(reduce_op, "name", reduce_op)).lower()


def _rtol(tensor: Tensor) -> float:
    return CLOSE if tensor.is_floating_point() else 0.0
