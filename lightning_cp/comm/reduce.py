"""Sums and maxima over the context-parallel group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.failure import named
from lightning_cp.comm.p2p import exchange


def sum_(tensor: Tensor, *, group: Any) -> Tensor:
    """Add `tensor` over the ranks of `group`, in place; the same value on every rank.

    Raises:
        PeerError: if a peer failed.
    """
    with named("a sum over the context-parallel group"):
        dist.all_reduce(tensor, group=group)
    return tensor


def max_(tensor: Tensor, *, group: Any) -> Tensor:
    """Largest element over the ranks of `group`, in place; backends do not agree on NaN.

    Raises:
        PeerError: if a peer failed.
    """
    with named("a maximum over the context-parallel group"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def sum_scattered(parts: Sequence[Tensor], *, rank: int, group: Any) -> Tensor:
    """What all ranks hold for this one, added up in rank order.

    Args:
        parts: one contiguous tensor per rank; part `p` of every rank has the same shape and goes
            to rank `p`.
        rank: rank within the group.
        group: process group; every rank of it calls.

    Returns:
        The sum of part `rank` over all ranks, in its dtype; half precision is added in float32.

    Raises:
        PeerError: if a peer failed.
    """
    own = parts[rank]
    found = [own if peer == rank else torch.empty_like(own) for peer in range(len(parts))]
    peers = [peer for peer in range(len(parts)) if peer != rank]
    exchange(
        [(peer, parts[peer]) for peer in peers if parts[peer].numel()],
        [(peer, found[peer]) for peer in peers if own.numel()],
        group=group,
    ).wait()
    half = own.dtype in (torch.bfloat16, torch.float16)
    total = own.new_zeros(own.shape, dtype=torch.float32 if half else own.dtype)
    for part in found:
        total += part
    return total.to(own.dtype)
