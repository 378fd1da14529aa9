"""When sharded parameters are gathered, beside the traffic of attention.

A block of a sharded module is gathered right before its forward and its backward. In which window
of the block before it that begins decides what it competes with: with the keys and values of that
block's attention, or with nothing, while its linear layers run.

Only public methods of FSDP2 are used, so that a user's own settings of a block are the worst that
this can undo.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from lightning_cp.compat import in_backward

WINDOWS = ("fsdp", "early", "after_attention")
"""When the next block is gathered, see `Gathers`."""


class Gathers:
    """Gathers the parameters of the next block while a block is computed.

    The order of the blocks is that of the first forward; until it is over, and wherever a later
    one leaves it, a block gathers its parameters itself. Every rank must run the same blocks in the
    same order, as FSDP2 demands anyway, and every rank takes the same window.

    Args:
        root: the sharded root module; its own parameters are not moved.
        window: "fsdp", torch's own order: before a block's forward, and in the backward when the
            block before it begins; "early", when the block before it begins, forward and
            backward; "after_attention", when the attention of the block before it has been queued.
    """

    def __init__(self, root: nn.Module, window: str = "fsdp") -> None:
        parts = [part for part in root.modules() if part is not root]
        self._blocks = [part for part in parts if isinstance(part, FSDPModule)]
        self._order: list[FSDPModule] = []
        self._learned = False
        self._window = "fsdp"
        self._wanted = window
        self._inside: tuple[FSDPModule, bool] | None = None
        self._ahead: set[FSDPModule] = set()
        self._hooks = [
            hook
            for block in self._blocks
            for hook in (
                block.register_forward_pre_hook(self._enter),
                block.register_forward_hook(self._leave),
            )
        ]

    @property
    def window(self) -> str:
        """The window that blocks are gathered in now: "fsdp" until their order is known."""
        return self._window

    def choose(self, window: str) -> None:
        """Take another window, from the next forward on."""
        self._wanted = window

    def attended(self) -> None:
        """Called when the work of an attention call has been queued, forward or backward."""
        if self._window == "after_attention" and self._inside is not None:
            block, backward = self._inside
            if in_backward() == backward:
                self._gather(block, backward=backward)

    def settle(self, *, failed: bool = False) -> None:
        """After a step: what was gathered for a block that did not come is freed again.

        Args:
            failed: whether the step raised; nothing is waited for then.
        """
        for block in self._order:
            if block in self._ahead and not failed:
                block.unshard()
                block.reshard()
        self._ahead.clear()
        self._inside = None

    def close(self, *, failed: bool = False) -> None:
        """Leave the blocks to FSDP2; see `settle`."""
        self.settle(failed=failed)
        for hook in self._hooks:
            hook.remove()
        self._arrange("fsdp")

    def _enter(self, block: Any, args: Any) -> None:
        """A block's forward begins; what is recomputed in a backward says nothing new."""
        if in_backward():
            return
        if not self._learned and block in self._order:
            self._learned = True
        if not self._learned:
            self._order.append(block)
        elif self._window != self._wanted and block is self._order[0]:
            self._arrange(self._wanted)
        self._begin(block, backward=False)

    def _leave(self, block: Any, args: Any, output: Any) -> None:
        """A block's forward ends; its backward begins with the gradient of something it gave."""
        given = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if given and not in_backward():
            torch.autograd.graph.register_multi_grad_hook(
                given, lambda _: self._begin(block, backward=True), mode="any"
            )

    def _begin(self, block: FSDPModule, *, backward: bool) -> None:
        self._inside = (block, backward)
        self._ahead.discard(block)
        if self._window == "early":
            self._gather(block, backward=backward)

    def _gather(self, block: FSDPModule, *, backward: bool) -> None:
        """Start to gather the block that comes after another one."""
        if block not in self._order:
            return
        at = self._order.index(block) + (-1 if backward else 1)
        if 0 <= at < len(self._order) and self._order[at] not in self._ahead:
            self._ahead.add(self._order[at])
            self._order[at].unshard(async_op=True)

    def _arrange(self, window: str) -> None:
        self._window = window
        for block in self._order:
            # A block that is to gather itself, which it has done, gathers no other.
            block.set_modules_to_backward_prefetch([] if window == "fsdp" else [block])
