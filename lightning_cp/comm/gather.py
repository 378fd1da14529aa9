"""Gathering the shards of a group, which may differ in size."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.failure import named
from lightning_cp.comm.p2p import exchange


def all_gather(
    shard: Tensor, sizes: Sequence[int], *, dim: int, rank: int, group: Any
) -> list[Tensor]:
    """Every rank's shard, in rank order; shards differ only in their size at `dim`.

    Args:
        shard: this rank's tensor.
        sizes: size at `dim` of every rank.
        dim: the dimension that differs.
        rank: rank within the group.
        group: process group; every rank of it calls.
    """
    own = shard.contiguous()
    shards = _places(own, sizes, dim=dim, rank=rank)
    peers = [peer for peer in range(len(sizes)) if peer != rank]
    exchange(
        [(peer, own) for peer in peers if own.numel()],
        [(peer, shards[peer]) for peer in peers if shards[peer].numel()],
        group=group,
    ).wait()
    return shards


def gather(
    shard: Tensor, sizes: Sequence[int], *, dim: int, rank: int, group: Any, to: int
) -> list[Tensor]:
    """Every rank's shard on one rank, in rank order; the other ranks get an empty list.

    Args:
        shard: this rank's tensor; shards differ only in their size at `dim`.
        sizes: size at `dim` of every rank.
        dim: the dimension that differs.
        rank: rank within the group.
        group: process group; every rank of it calls.
        to: the rank that gets the shards.
    """
    own = shard.contiguous()
    if rank != to:
        exchange([(to, own)] if own.numel() else [], [], group=group).wait()
        return []
    shards = _places(own, sizes, dim=dim, rank=rank)
    receives = [(peer, x) for peer, x in enumerate(shards) if peer != rank and x.numel()]
    exchange([], receives, group=group).wait()
    return shards


def _places(own: Tensor, sizes: Sequence[int], *, dim: int, rank: int) -> list[Tensor]:
    """This rank's tensor among uninitialised ones of the shapes of the others."""
    found = []
    for peer, size in enumerate(sizes):
        shape = list(own.shape)
        shape[dim] = size
        found.append(own if peer == rank else own.new_empty(shape))
    return found


def gather_objects(value: Any, *, group: Any) -> list[Any]:
    """Every rank's value, in rank order; values are small and can be pickled.

    Args:
        value: this rank's value.
        group: CPU process group; every rank of it calls.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    with named("a gather of reports"):
        dist.all_gather_object(found, value, group=group)
    return found
