"""Point-to-point exchange of packed buffers: one batch per round and direction.

[Note: streams and buffers] On CUDA everything here is queued and nothing waits for the device.
`exchange` records where the current stream is; the communication stream of NCCL starts the messages
once that point is reached, so packing copies that were queued before are done, and tiles that are
queued after run beside the messages. `Pending.wait` makes the current stream wait for the end of
the messages, and returns at once: kernels that are queued after it see what arrived. A call posts
and waits on one stream.

The caching allocator hands memory that is freed to later work of the stream it was allocated on,
whatever other streams still do with it. So `Pending` holds sent and received buffers until `wait`
has put the end of the messages before all later work of the current stream; from then on a buffer
may be freed like any other, without `record_stream`, which would keep memory until the allocator
happens to look. Buffers are allocated on the stream that posts them.

A round is posted before the tiles of the round before it are queued, so its packing copies wait for
no tile of theirs; a stream of its own for packing could start them earlier only than the tiles of
two rounds before, and would need a second bound on memory. There is none.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.failure import named

Message = tuple[int, Tensor]
"""A peer (rank within the group) and one contiguous buffer."""


Role = Literal["keys", "heads"]
"""What messages are for: keys, values and their gradients, or a swap of heads for tokens. Each role
has a communicator of its own, on which messages are in order."""


class Waiting(Protocol):
    """Messages in flight; their buffers must not be touched before `wait` returns.

    Attributes:
        ready: whether `wait` can return, if only what runs in this process is done meanwhile.
    """

    @property
    def ready(self) -> bool: ...

    def wait(self) -> None: ...


class Link(Protocol):
    """What carries the messages of a plan: see `exchange`."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> Waiting: ...


class GroupLink:
    """Messages over a process group.

    Args:
        group: process group; peers are ranks within it.
        heads: process group of the same ranks in the same order for swaps of heads for tokens,
            `group` where None.
    """

    def __init__(self, group: Any, heads: Any = None) -> None:
        self.group = group
        self._groups: dict[Role, Any] = {"keys": group, "heads": group if heads is None else heads}

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> Waiting:
        """See `exchange`."""
        return exchange(sends, receives, group=self._groups[role])


class BlockingLink:
    """Posts messages when they are waited for, so that none travels while a rank computes.

    Any executor runs without overlap over it. Peers must wait for their messages in
    one order, as the rounds of a plan do; buffers are as many as with overlap.

    Args:
        link: what carries the messages.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> Waiting:
        """See `exchange`."""
        return _Deferred(self._link, sends, receives, role)


class _Deferred:
    """Messages that nobody has posted yet."""

    def __init__(
        self, link: Link, sends: Sequence[Message], receives: Sequence[Message], role: Role
    ) -> None:
        self._link, self._sends, self._receives, self._role = link, sends, receives, role

    ready = True

    def wait(self) -> None:
        """Post every message and wait for it."""
        self._link.exchange(self._sends, self._receives, role=self._role).wait()
        self._sends, self._receives = (), ()


class Pending:
    """Messages in flight. Buffers must not be touched before `wait` returns."""

    ready = True

    def __init__(self, works: Sequence[Any], buffers: Sequence[Tensor]) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        """Wait for every message, sent and received.

        Raises:
            PeerError: if a peer failed or did not answer in time.
        """
        with named("an exchange of keys and values"):
            for work in self._works:
                work.wait()
        self._works, self._buffers = (), ()


def exchange(sends: Sequence[Message], receives: Sequence[Message], *, group: Any) -> Pending:
    """Start sending and receiving; every rank of the group must post matching messages.

    Args:
        sends: contiguous buffers to send, each at least one element.
        receives: contiguous buffers to fill, in the order in which a peer sends.
        group: process group; peers are ranks within it.

    Raises:
        PeerError: if a peer failed.
    """
    if not sends and not receives:
        return Pending((), ())
    operations = [
        dist.P2POp(call, buffer, group=group, group_peer=peer)
        for call, messages in ((dist.isend, sends), (dist.irecv, receives))
        for peer, buffer in messages
    ]
    with named("an exchange of keys and values"):
        works = dist.batch_isend_irecv(operations)
    return Pending(works, [operation.tensor for operation in operations])
