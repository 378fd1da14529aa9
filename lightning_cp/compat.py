"""Names of torch that moved between versions or are private, each with one home."""

from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """The key-value store of the default process group, or None before there is one."""
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
