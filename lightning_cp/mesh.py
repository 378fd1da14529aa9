"""Process groups: one per role, made on all ranks in one fixed order, never shared."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp.topology import Coordinates, Topology


@dataclass(eq=False, kw_only=True)
class Mesh:
    """The groups that one rank belongs to.

    Attributes:
        topology: sizes of the axes.
        rank: global rank.
        cp: keys, values and their gradients travel here; also the sums of the loss.
        cp_a2a: the same ranks: heads swapped for tokens.
        meta: gloo on the CPU: digests and error reports.
        grad: gradient all-reduces over every rank.
        dp: one rank of every virtual device: logged values and metrics.
    """

    topology: Topology
    rank: int
    cp: Any
    cp_a2a: Any
    meta: Any
    grad: Any
    dp: Any

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of this rank."""
        return self.topology.coordinates(self.rank)

    def close(self) -> None:
        """Give the groups back: their threads and files, which end with the last reference."""
        for group in (self.cp, self.cp_a2a, self.meta, self.grad, self.dp):
            dist.destroy_process_group(group)
        self.cp = self.cp_a2a = self.meta = self.grad = self.dp = None


def build_mesh(
    topology: Topology, *, device: torch.device, timeout: timedelta | None = None
) -> Mesh:
    """Make every group of every role; a collective call for all ranks of the job.

    Each role has a communicator of its own even where the ranks are the same, so that traffic of
    one role never queues behind another's. On devices whose backend makes connections lazily, a
    warm-up all-reduce makes them here.

    Args:
        topology: sizes of the axes; its world is the default group's.
        device: device of this rank's activations.
        timeout: how long a collective may wait, torch's default where None.
    """
    rank = dist.get_rank()

    def own(groups: tuple[tuple[int, ...], ...], backend: str | None) -> Any:
        made = [dist.new_group(list(ranks), timeout, backend) for ranks in groups]
        return next(g for g, ranks in zip(made, groups, strict=True) if rank in ranks)

    mesh = Mesh(
        topology=topology,
        rank=rank,
        cp=own(topology.cp_groups(), None),
        cp_a2a=own(topology.cp_groups(), None),
        meta=own(topology.cp_groups(), "gloo"),
        grad=own((tuple(range(topology.world)),), None),
        dp=own(topology.dp_groups(), None),
    )
    if device.type != "cpu":
        for group in (mesh.cp, mesh.cp_a2a, mesh.grad, mesh.dp):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return mesh


def parameter_mesh(
    topology: Topology, *, device: torch.device, timeout: timedelta | None = None
) -> DeviceMesh:
    """Make the group of the role `param`: gathers of parameters and sums of their gradients.

    It holds every rank of the job and is a group of its own. Sharded parameters need it for as long
    as they exist, so it is not part of `Mesh`, which is closed at the end of a run.

    Args:
        topology: sizes of the axes.
        device: device of this rank's parameters.
        timeout: how long a collective may wait, torch's default where None.

    Returns:
        A mesh of one dimension, named after the group: torch takes meshes with equal names and
        ranks for one, and would then use the group of the first.
    """
    group = dist.new_group(list(range(topology.world)), timeout)
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    name = f"param_{group.group_name}"
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))
