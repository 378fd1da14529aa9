"""Names of torch that moved between versions or are private, each with one home."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.data._utils import worker


def default_store() -> Any:
    """The key-value store of the default process group, or None before there is one."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def default_world() -> int:
    """Number of ranks of the default process group, 1 before there is one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def finished_work() -> Any:
    """What a collective returns that has nothing to do any more."""
    return Work.boxed(FakeWork())


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, given as such, as an operator's argument or by name.

    Without a group: none.
    """
    if group is None:
        return ()
    if isinstance(group, str):
        named: Any = group
        group = torch._C._distributed_c10d._resolve_process_group(named)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def group_name(value: Any) -> str | None:
    """Name of a process group that is an argument of a communication operator, else None."""
    try:
        return str(dist.ProcessGroup.unbox(value).group_name)
    except (RuntimeError, TypeError):
        return None


def lone_mesh(device_type: str, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one rank, with dimensions of these names, without process groups."""
    mesh = DeviceMesh(
        device_type,
        torch.zeros((1,) * len(names), dtype=torch.int),
        mesh_dim_names=names,
        _init_backend=False,
        _rank=0,
    )
    mesh._dim_group_names = []
    return mesh


def urgent_options(device_type: str, *, ctas: int, timeout: timedelta | None) -> Any:
    """Options of an NCCL group whose kernels go first, on at most so many blocks of threads.

    NCCL_MAX_CTAS in the environment wins over `ctas`. None for other devices than CUDA.
    """
    if device_type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = ctas
    if timeout is not None:
        options._timeout = timeout
    return options


def gather_into(output: torch.Tensor, part: torch.Tensor, *, group: Any) -> Any:
    """Start to gather equal parts of all ranks into one tensor; named anew in torch 2.13."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=True)


def in_backward() -> bool:
    """Whether a backward pass is running on this thread, recomputed forwards included."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_selective_checkpoint() -> bool:
    """Whether this is a forward of a selective checkpoint, the first one or its repetition."""
    modes = _get_current_dispatch_mode_stack()
    kinds = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    return any(isinstance(mode, kinds) for mode in modes)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def forward_sync_buffers(sync: bool) -> dict[str, Any]:
    """Keyword of DistributedDataParallel: whether a forward copies buffers from the first rank."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: sync}


def before_backward(module: Any, loss: torch.Tensor) -> None:
    """Prepare a sharded root for the backward of a loss that none of its methods has returned."""
    if loss.requires_grad:
        loss.register_hook(module._get_fsdp_state()._pre_backward)


def free_gathered(module: Any) -> None:
    """Free the gathered parameters of a sharded module.

    `FSDPModule.reshard` does nothing between the beginning and the end of a root's forward.
    """
    for group in _parameter_groups(module):
        group._to_sharded()


def _parameter_groups(module: Any) -> list[Any]:
    """What a sharded module gathers together: several groups, or before torch 2.13 at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def follow_requires_grad(module: Any) -> None:
    """Let the gathered parameters of a sharded module require gradients as their parts do."""
    for group in _parameter_groups(module):
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.requires_grad_(parameter.sharded_param.requires_grad)


def can_reduce_unused() -> bool:
    """Whether a rank can add zeros for a parameter that only others used; torch 2.13 can.

    Gradients of a sharded module are added up in one buffer: a rank that leaves one out would add
    those behind it to other parameters'.
    """
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def reduce_unused(module: Any) -> None:
    """Let ranks that did not use a parameter add zeros; see `can_reduce_unused`."""
    module.set_reduce_scatter_unused_params(True)


def unflattened(values: dict[str, Any], places: dict[str, Any]) -> dict[str, Any]:
    """Nested containers of the values of a distributed checkpoint, given the place of every key."""
    nested: dict[str, Any] = unflatten_state_dict(values, places)
    return nested


@contextmanager
def outside_worker() -> Iterator[None]:
    """Let `get_worker_info` say that no process loads data for another."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
