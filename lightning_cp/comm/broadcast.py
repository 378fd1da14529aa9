"""One rank's value on every rank of a group."""

from typing import Any

import torch.distributed as dist

from lightning_cp.comm.failure import named


def broadcast_object(value: Any, *, group: Any) -> Any:
    """The value of the first rank of a group, on every rank of it.

    Args:
        value: what can be pickled, tensors on the CPU included; ignored on the other ranks.
        group: CPU process group; every rank of it calls.

    Raises:
        PeerError: if a peer failed or did not answer in time.
    """
    box = [value]
    with named("a broadcast of a batch"):
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
