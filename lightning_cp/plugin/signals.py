"""SIGTERM and requeue signals: all ranks act on them at the same batch.

[Note: why not at once] A signal interrupts every rank elsewhere, or only one of them. Lightning's
handlers talk to the other ranks, and one that waits for keys and values of this rank never gets to
its own handler. So a signal is only noted. With every training batch the ranks tell each other what
they noted, in a message that travels while the batch is computed; when one noted a signal, all of
them run Lightning's handler where no accumulated gradient is lost: that of a requeue signal, which
saves at once, before a batch with which an accumulation begins; that of SIGTERM, which lets a batch
end, before one with which it ends. What other ranks note soon after is the same signal.
"""

import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_cp.comm.failure import named
from lightning_cp.mesh import Mesh

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

SAME = 2
"""For as many batches after its handlers a signal is the same one, which reached a rank later."""

COMPOSED = "_HandlersCompose"
"""Name of the class of Lightning's handlers."""


class Signals:
    """Lightning's handlers, put off.

    Args:
        handlers: by the number of the signal; the same signals on every rank.
        timeout: how long a rank may wait for another.
    """

    def __init__(
        self, handlers: dict[int, Callable[..., Any]], timeout: timedelta | None = None
    ) -> None:
        self._handlers = dict(sorted(handlers.items()))
        self._noted: set[int] = set()
        self._due: set[int] = set()
        self._since = dict.fromkeys(self._handlers, SAME)
        self._votes, self._work = torch.zeros(len(handlers), dtype=torch.int64), None
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        for number in self._handlers:
            signal.signal(number, self._note)

    def tell(self, batch: int, accumulated: int) -> None:
        """Tell the other ranks, learn of what they told last time; a collective call of all ranks.

        Args:
            batch: index of the batch that is about to be trained, the same on every rank.
            accumulated: number of batches of a step.
        """
        self._learn()
        noted, self._noted = self._noted, set()
        self._votes = torch.tensor([number in noted for number in self._handlers]).long()
        self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)
        for number in sorted(self._due):
            if (batch + (number == signal.SIGTERM)) % accumulated == 0:
                self._due.remove(number)
                self._since[number] = 0
                self._handlers[number](number, None)

    def close(self) -> None:
        """Put Lightning's handlers back."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        dist.destroy_process_group(self._group)
        self._group = self._work = None

    def _learn(self) -> None:
        if self._work is None:
            return
        with named("telling other ranks of signals"):
            self._work.wait()
        for number, count in zip(self._handlers, self._votes.tolist(), strict=True):
            if count and self._since[number] >= SAME:
                self._due.add(number)
            self._since[number] += 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)


class Signalled(Host):
    """Puts off Lightning's handlers while several ranks train."""

    _mesh: Mesh | None
    _timeout: Any
    _signals: Signals | None = None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._mesh is None or threading.current_thread() is not threading.main_thread():
            return
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers: dict[int, Any] = {
            number: handler
            for number, handler in found.items()
            if type(handler).__name__ == COMPOSED
        }
        if handlers:
            self._signals = Signals(handlers, self._timeout)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        module = self.lightning_module
        if self._signals is not None and module is not None:
            self._signals.tell(batch_idx, module.trainer.accumulate_grad_batches)

    @override
    def teardown(self) -> None:
        if self._signals is not None:
            self._signals.close()
        self._signals = None
        super().teardown()
