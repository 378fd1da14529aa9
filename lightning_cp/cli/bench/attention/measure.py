"""The two arms of a pair and their instruments.

[Note: the ideal] The ideal of a rank is its own share of the kernel's work and nothing else: the
kernel calls of a forward and a backward of the same exchange with all heads at once
(`head_chunks=1`), tile by tile and round by round, on buffers that were filled before. It sends
nothing, packs nothing, merges nothing and adds nothing up, so no executor can beat it but by other
kernel calls. What the exchange itself loses by cutting heads into groups counts as a loss.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from torch import Tensor

from lightning_cp.comm.p2p import Link, Message, Role, Waiting
from lightning_cp.exchange import executor
from lightning_cp.exchange.probe import Phase, Probe, silent
from lightning_cp.kernels import Kernel
from lightning_cp.kernels.base import Gradients, Part, Saved
from lightning_cp.plan import Plan, Tile


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient of the output: `[B, H or Hk, S, D]` of one dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Attention(NamedTuple):
    """The output and the gradients."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


NOTHING = (nullcontext(), nullcontext())
"""Watches neither forward nor backward."""


class DistributedCall:
    """Forward and backward of one rank by its plan.

    Args:
        plan: the rank's plan.
        kernel: what computes tiles.
        inputs: local tensors.
        link: what carries the messages.
    """

    def __init__(self, plan: Plan, kernel: Kernel, inputs: Inputs, link: Link) -> None:
        self._plan, self._kernel, self._inputs, self._link = plan, kernel, inputs, link

    def __call__(
        self,
        probe: Probe = silent,
        *,
        watch: Sequence[AbstractContextManager[object]] = NOTHING,
    ) -> Attention:
        """Run once, every rank together.

        Args:
            probe: is told of the phases.
            watch: entered around the forward and around the backward.
        """
        q, k, v, grad_out = self._inputs
        call = executor.Call(self._kernel, q.shape[-1] ** -0.5, self._link, probe)
        kept: list[Tensor] = []
        with watch[0]:
            out, lse = executor.run(executor.forward(self._plan, call, q, k, v, kept=kept))
        saved = Saved(q, out, lse, grad_out)
        with watch[1]:
            grads = executor.run(executor.backward(self._plan, call, saved, k, v, kept=kept))
        return Attention(out, *grads)


class KernelCalls(Kernel):
    """Passes a kernel's calls on and keeps them, with their tensors; see [Note: the ideal].

    Args:
        kernel: what computes tiles.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._calls: list[Callable[[], Iterator[Part | Gradients]]] = []

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        return self._kernel.rejects(q, v)

    def forward(
        self, tiles: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Part]:
        """See `Kernel.forward`."""
        call = partial(self._kernel.forward, tiles, q, k, v, scale=scale)
        self._calls.append(call)
        return call()

    def backward(
        self, tiles: Sequence[Tile], saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Gradients]:
        """See `Kernel.backward`."""
        call = partial(self._kernel.backward, tiles, saved, k, v, scale=scale)
        self._calls.append(call)
        return call()

    def again(self) -> None:
        """Repeat every call; results are dropped one by one."""
        for call in self._calls:
            deque(call(), maxlen=0)


class CountingLink:
    """Counts what is sent.

    Args:
        link: what carries the messages.

    Attributes:
        bytes_sent: bytes of the messages that were posted.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.bytes_sent = 0

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, role: Role = "keys"
    ) -> Waiting:
        """See `lightning_cp.comm.p2p.exchange`."""
        self.bytes_sent += sum(buffer.nbytes for _, buffer in sends)
        return self._link.exchange(sends, receives, role=role)


class Took(NamedTuple):
    """Seconds of a run: CPU time of the process, all its threads together, and wall time."""

    cpu: float
    wall: float


def timed(call: Callable[[], object], *, barrier: Callable[[], object]) -> Took:
    """Run once, after `barrier`, which lets all ranks start together."""
    barrier()
    wall, cpu = time.monotonic(), time.process_time()
    call()
    return Took(time.process_time() - cpu, time.monotonic() - wall)


class PhaseTimes:
    """A probe that adds up CPU time of the calling thread by phase, in seconds.

    Attributes:
        seconds: by phase, those that were entered.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Measure one phase."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds[phase] += time.thread_time() - start


def phases(
    call: Callable[[Probe], object], *, runs: int, barrier: Callable[[], object]
) -> dict[str, float]:
    """CPU seconds of one run by phase, the mean over `runs`.

    The phases of the probe, "other" for the rest of the calling thread, and "background" for the
    other threads of the process; together they are the CPU time of the process.
    """
    probe, process, thread = PhaseTimes(), 0.0, 0.0
    for _ in range(runs):
        barrier()
        before = time.process_time(), time.thread_time()
        call(probe)
        process += time.process_time() - before[0]
        thread += time.thread_time() - before[1]
    total = dict(probe.seconds)
    total["other"] = max(thread - sum(probe.seconds.values()), 0.0)
    total["background"] = max(process - thread, 0.0)
    return {phase: seconds / runs for phase, seconds in total.items()}
