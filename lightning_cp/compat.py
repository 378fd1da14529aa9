"""Names of torch that moved between versions or are private, each with one home."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def default_store() -> Any:
    """The key-value store of the default process group, or None before there is one."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def forward_sync_buffers(sync: bool) -> dict[str, Any]:
    """Keyword of DistributedDataParallel: whether a forward copies buffers from the first rank."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: sync}
