"""Process groups: one per role, made on all ranks in one fixed order, never shared."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.compat import lone_mesh, urgent_options
from lightning_cp.topology import Coordinates, Topology

CTAS = 8
"""Blocks of threads that a message of attention may take of a CUDA device; not tuned yet."""


@dataclass(eq=False, kw_only=True)
class Mesh:
    """The groups that one rank belongs to.

    Attributes:
        topology: sizes of the axes.
        rank: global rank.
        cp: keys, values and their gradients travel here; also the sums of the loss.
        cp_a2a: the same ranks: heads swapped for tokens.
        meta: gloo on the CPU: digests and error reports.
        grad: gradient all-reduces over every rank with the same part of the layers.
        dp: one rank of every virtual device: logged values and metrics.
        device: gloo on the CPU over all ranks of a virtual device, which read the same samples;
            the group of `meta` where these are the same.
    """

    topology: Topology
    rank: int
    cp: Any
    cp_a2a: Any
    meta: Any
    grad: Any
    dp: Any
    device: Any

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank."""
        return self.topology.coordinates(self.rank)

    def close(self) -> None:
        """Give the groups back: their threads and files, which end with the last reference."""
        for group in dict.fromkeys(
            (
                self.cp,
                self.cp_a2a,
                self.meta,
                self.grad,
                self.dp,
                self.device,
            )
        ):
            dist.destroy_process_group(group)
        self.cp = self.cp_a2a = self.meta = self.grad = self.dp = self.device = None


def build_mesh(
    topology: Topology, *, device: torch.device, timeout: timedelta | None = None
) -> Mesh:
    """Make every group of every role; a collective call for all ranks of the job.

    Each role has a communicator of its own even where the ranks are the same, so that traffic of
    one role never queues behind another's. On CUDA the messages of attention go first, and leave
    most of the device to its tiles; see `CTAS`. On devices whose backend makes connections lazily,
    a warm-up all-reduce makes them here.

    Args:
        topology: sizes of the axes; its world is the default group's.
        device: device of this rank's activations.
        timeout: how long a collective may wait, torch's default where None.
    """
    rank = dist.get_rank()

    def own(role: str, *axes: str, backend: str | None = None, urgent: bool = False) -> Any:
        options = urgent_options(device.type, ctas=CTAS, timeout=timeout) if urgent else None
        return _own_group(topology, role, axes, timeout=timeout, backend=backend, options=options)

    cp, meta = own("cp", "cp", urgent=True), own("meta", "cp", backend="gloo")
    mesh = Mesh(
        topology=topology,
        rank=rank,
        cp=cp,
        cp_a2a=own("cp_a2a", "cp", urgent=True),
        meta=meta,
        grad=own("grad", "dp_replicate", "dp_shard", "cp"),
        dp=own("dp", "dp_replicate", "dp_shard"),
        device=own("device", "cp", "tp", backend="gloo") if topology.tp > 1 else meta,
    )
    if device.type != "cpu":
        for group in (mesh.cp, mesh.cp_a2a, mesh.grad, mesh.dp):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return mesh


PREFIX = "lightning_cp:"
"""Before the role in what torch calls the description of a group."""


def _own_group(
    topology: Topology,
    role: str,
    axes: tuple[str, ...],
    *,
    timeout: timedelta | None,
    backend: str | None,
    options: Any = None,
) -> Any:
    """The group of this rank among those of some axes; all ranks make all of them.

    Profiles and torch's flight recorder show the role of a group beside its messages.
    """
    rank, groups = dist.get_rank(), topology.groups(*axes)
    made = [
        dist.new_group(list(ranks), timeout, backend, options, group_desc=f"{PREFIX}{role}")
        for ranks in groups
    ]
    return next(g for g, ranks in zip(made, groups, strict=True) if rank in ranks)


DIMENSIONS = {
    "data_parallel_replicate": ("dp_replicate",),
    "data_parallel": ("dp_shard", "cp"),
    "tensor_parallel": ("tp",),
}
"""Dimensions of the mesh of parameters by name, and the axes that each of them is made of."""


class ParameterMesh:
    """The mesh that parameters are cut for; Lightning's `device_mesh`.

    `mesh["data_parallel"]` are the ranks that hold different parts of a parameter (those of a
    context-parallel group among them), `mesh["tensor_parallel"]` those that share a layer,
    `mesh["data_parallel_replicate", "data_parallel"]` all over which gradients are averaged.
    Everything else is that of the `DeviceMesh` with these three dimensions.

    Args:
        mesh: the dimensions of `DIMENSIONS`.
        suffix: what its names have behind those of `DIMENSIONS`: torch takes meshes with equal
            names and ranks for one, and would then use the groups of the first.
    """

    def __init__(self, mesh: DeviceMesh, suffix: str) -> None:
        self._mesh, self._suffix = mesh, suffix

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh with these dimensions.

        Raises:
            KeyError: if there is no dimension of that name.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        for name in wanted:
            if name not in DIMENSIONS:
                raise KeyError(f"{name!r} is no dimension of the mesh; use {', '.join(DIMENSIONS)}")
        return self._mesh[tuple(name + self._suffix for name in wanted)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy is made, which has nothing yet
            raise AttributeError(name)
        return getattr(self._mesh, name)

    @property
    def parameters(self) -> DeviceMesh:
        """Where parameters are cut and gradients averaged: with replicas, two dimensions."""
        replicated = self["data_parallel_replicate"].size() > 1
        return self[("data_parallel_replicate", "data_parallel") if replicated else "data_parallel"]


def parameter_mesh(
    topology: Topology, *, device: torch.device, timeout: timedelta | None = None
) -> ParameterMesh:
    """Make the groups of the roles `replicate`, `param` and `tp`; a collective call for all ranks.

    Gathers of parameters and sums of their gradients go through `param`, sums of the parts'
    gradients between replicas through `replicate`, and what the layers of a tensor-parallel group
    exchange through `tp`. Parameters need them for as long as they exist, so they are not part of
    `Mesh`, which is closed at the end of a run.

    Args:
        topology: sizes of the axes.
        device: device of this rank's parameters.
        timeout: how long a collective may wait, torch's default where None.

    Returns:
        The mesh; of one rank it has no groups.
    """
    if topology.world == 1:
        return ParameterMesh(lone_mesh(device.type, tuple(DIMENSIONS)), "")
    groups = [
        _own_group(topology, role, axes, timeout=timeout, backend=None)
        for role, axes in zip(("replicate", "param", "tp"), DIMENSIONS.values(), strict=True)
    ]
    if device.type != "cpu":
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    sizes = topology.dp_replicate, topology.dp_shard * topology.cp, topology.tp
    stage = topology.coordinates(dist.get_rank()).pp
    ranks = torch.arange(topology.world).view(topology.pp, *sizes)[stage]
    suffix = f"_{groups[1].group_name}"
    names = tuple(name + suffix for name in DIMENSIONS)
    mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)
    return ParameterMesh(mesh, suffix)
