"""Collectives of the strategy: between virtual devices where they are about values of steps."""

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_cp.mesh import Mesh
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.virtual import device_value, gather_group, reduces_over_devices

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

T = TypeVar("T")


class Collectives(Host):
    """What the Trainer and modules call on the strategy to talk to other ranks."""

    _flavor: ClassVar[Flavor]
    _mesh: Mesh | None

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        within = self._mesh is not None and self._mesh.topology.cp > 1 and group is None
        if self._mesh is not None and within and reduces_over_devices(reduce_op):
            tensor.copy_(device_value(tensor, self._mesh, reduce_op))
            group = self._mesh.dp
        return self._flavor.reduce(tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        self._flavor.reduce(votes, None, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._mesh is not None and self._mesh.topology.cp > 1:
            group = gather_group(self._mesh, group)
            if group is self._mesh.dp and self._mesh.topology.dp == 1:
                return tensor
        gathered: Tensor = self._flavor.all_gather(tensor, group=group, sync_grads=sync_grads)
        return gathered
