"""A link for benchmarks that is as slow as asked for.

[Note: an emulated link] Real messages travel at once over the link inside. Each is followed by a
tiny one that says when its last byte would have left its sender at the asked rate; both sides wait
until then, asleep. The clock is `time.monotonic`, which all processes of one Linux machine share.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from lightning_cp.comm.p2p import Link, Message, Role, Waiting
from lightning_cp.compat import gather_into
from lightning_cp.errors import ConfigError

PROBE_BYTES = 8 * 2**20
"""Size of a message by which a link measures its own rate."""


class Span(NamedTuple):
    """What took the time from `start` to `stop`, by `time.monotonic`.

    Attributes:
        kind: "messages" or "parameters", which leave this rank; or "waiting" of the rank itself.
    """

    kind: Literal["messages", "parameters", "waiting"]
    start: float
    stop: float


class ThrottledLink:
    """A full-duplex link of one rate out of every rank; see [Note: an emulated link].

    A token bucket without burst: a message leaves after all that were posted before it, keys,
    values and gradients alike, to whichever peer. What arrives at a rank from several peers at
    once is not limited further, and latency is that of the link inside.

    Args:
        link: what really carries the messages, faster than `gbit_per_second`; its tensors are on
            the CPU.
        gbit_per_second: rate in 1e9 bits per second.

    Attributes:
        spans: what left and what waited, in the order of its end; grows until it is cleared.

    Raises:
        ConfigError: if the rate is not above 0.
    """

    def __init__(self, link: Link, gbit_per_second: float) -> None:
        if not gbit_per_second > 0:
            raise ConfigError(
                f"a link of {gbit_per_second} Gbit/s carries nothing; choose a rate above 0"
            )
        self._link = link
        self._bytes_per_second = gbit_per_second * 1e9 / 8
        self._free = 0.0
        self.spans: list[Span] = []

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> Waiting:
        """See `lightning_cp.comm.p2p.exchange`."""
        left = [
            torch.tensor([self.leaves(buffer.nbytes, "messages")], dtype=torch.float64)
            for _, buffer in sends
        ]
        due = [torch.empty(1, dtype=torch.float64) for _ in receives]
        pending = self._link.exchange(
            _interleaved(sends, left), _interleaved(receives, due), role=role
        )
        return _Paced(self, pending, [*left, *due])

    def leaves(self, size: int, kind: Literal["messages", "parameters"]) -> float:
        """When the last of `size` bytes leaves that are posted now, by `time.monotonic`."""
        start = max(time.monotonic(), self._free)
        self._free = start + size / self._bytes_per_second
        self.spans.append(Span(kind, start, self._free))
        return self._free

    def wait(self, pending: Any, due: Iterable[float]) -> None:
        """Wait for what is pending, then until the latest of `due`, known only then."""
        start = time.monotonic()
        pending.wait()
        now = time.monotonic()
        stop = max([now, *due])
        if stop > now:
            time.sleep(stop - now)
        self.spans.append(Span("waiting", start, stop))


class ThrottledGather:
    """What `FSDPModule.set_custom_all_gather` takes: gathers that share a throttled link.

    A gather takes as long as a ring of the group's ranks would; every rank waits for its own
    messages to leave.

    Args:
        link: the link of this rank.
    """

    def __init__(self, link: ThrottledLink) -> None:
        self._link = link

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather equal parts of all ranks; without `async_op` wait until the link is free again."""
        size = input_tensor.nbytes * (dist.get_world_size(group) - 1)
        due = self._link.leaves(size, "parameters")
        work = gather_into(output_tensor, input_tensor, group=group)
        paced = _PacedWork(self._link, work, due)
        if async_op:
            return paced
        paced.wait()
        return None


class _PacedWork(Work):
    """A collective in flight until it is due."""

    def __init__(self, link: ThrottledLink, work: Any, due: float) -> None:
        super().__init__()
        self._link, self._work, self._due = link, work, due

    def wait(self, timeout: Any = None) -> bool:
        self._link.wait(self._work, [self._due])
        return True


class _Paced:
    """Messages in flight until the last of them is due."""

    ready = True

    def __init__(self, link: ThrottledLink, pending: Waiting, due: Sequence[Tensor]) -> None:
        self._link, self._pending, self._due = link, pending, due

    def wait(self) -> None:
        """Wait for every message, then sleep until it is due."""
        self._link.wait(self._pending, map(float, self._due))


def measured_rate(
    link: Link, *, rank: int, world: int, size: int = PROBE_BYTES, messages: int = 4
) -> float:
    """Rate of a link in Gbit/s, while every rank sends to the next and receives from the last.

    Args:
        link: what carries the messages; every rank calls.
        rank: rank within the group.
        world: ranks of the group, at least 2.
        size: bytes of a message.
        messages: number of messages, posted one after another and waited for together.
    """
    after, before = (rank + 1) % world, (rank - 1) % world
    signal, answer = torch.zeros(1), torch.zeros(1)
    link.exchange([(after, signal)], [(before, answer)]).wait()
    sent = torch.zeros(size, dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(messages)]
    start = time.monotonic()
    pending = [link.exchange([(after, sent)], [(before, buffer)]) for buffer in received]
    for waiting in pending:
        waiting.wait()
    return 8 * size * messages / (time.monotonic() - start) / 1e9


def _interleaved(messages: Sequence[Message], extra: Iterable[Tensor]) -> list[Message]:
    """Every message, followed by the one that belongs to it."""
    pairs = zip(messages, extra, strict=True)
    return [part for message, more in pairs for part in (message, (message[0], more))]
