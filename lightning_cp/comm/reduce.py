"""Sums over the context-parallel group."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.failure import named


def sum_(tensor: Tensor, *, group: Any) -> Tensor:
    """Add `tensor` over the ranks of `group`, in place; the same value on every rank.

    Raises:
        PeerError: if a peer failed.
    """
    with named("a sum over the context-parallel group"):
        dist.all_reduce(tensor, group=group)
    return tensor
