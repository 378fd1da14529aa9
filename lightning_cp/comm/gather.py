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

    def shape(size: int) -> list[int]:
        return [size if index == dim % shard.ndim else n for index, n in enumerate(shard.shape)]

    own = shard.contiguous()
    shards = [own if peer == rank else own.new_empty(shape(n)) for peer, n in enumerate(sizes)]
    peers = [peer for peer in range(len(sizes)) if peer != rank]
    exchange(
        [(peer, own) for peer in peers if own.numel()],
        [(peer, shards[peer]) for peer in peers if shards[peer].numel()],
        group=group,
    ).wait()
    return shards


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
