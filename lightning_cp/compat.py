"""Names of torch that moved between versions or are private, each with one home."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch.nn.parallel import DistributedDataParallel


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


def in_backward() -> bool:
    """Whether a backward pass is running on this thread, recomputed forwards included."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def forward_sync_buffers(sync: bool) -> dict[str, Any]:
    """Keyword of DistributedDataParallel: whether a forward copies buffers from the first rank."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: sync}
