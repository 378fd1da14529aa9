"""When a strategy gathers the parameters of the next block: `param_gather`."""

import warnings
from typing import Any

from torch import Tensor, nn

from lightning_cp.api import ContextParallel
from lightning_cp.balance import gather_window
from lightning_cp.context import Context
from lightning_cp.errors import ContextParallelWarning
from lightning_cp.fsdp import sharded_parts
from lightning_cp.gathers import Gathers
from lightning_cp.plan import Sizes, group_load
from lightning_cp.plugin.sharding import ShardedParameters


class GatherWindows(ShardedParameters):
    """Gathers blocks in the window that was asked for; "auto" decides after the first step."""

    _parallel: ContextParallel | None
    _context: Context | None
    _gathers: Gathers | None = None
    _decided = False

    @property
    def gather_window(self) -> str:
        """The window that the next block is gathered in now, "fsdp" while nothing else is done."""
        return "fsdp" if self._gathers is None else self._gathers.window

    def _open_window(self, module: nn.Module) -> None:
        """Begin to watch the blocks of a sharded module."""
        wanted, count = self._config.param_gather, len(sharded_parts(module)) - 1
        if self._mesh is None or wanted == "fsdp":
            return
        reason = way_out = ""
        if count < 2:
            reason = f"the model has {count} blocks that are gathered apart, and it takes two"
            way_out = "name its blocks in auto_wrap_policy"
        elif self._parallel is None and wanted != "early":
            reason = "it waits for attention of context parallelism, and context_parallel_size is 1"
            way_out = "say 'early'"
        if reason:
            if wanted != "auto" and self._mesh.rank == 0:
                warnings.warn(
                    f"param_gather={wanted!r} does nothing: {reason}; torch's own order is kept; "
                    f"{way_out}, or leave param_gather out",
                    ContextParallelWarning,
                    stacklevel=2,
                )
            return
        self._decided = wanted != "auto"
        self._gathers = Gathers(module, wanted if self._decided else "fsdp")
        if self._parallel is not None:
            self._parallel.attended = self._gathers.attended

    def post_backward(self, closure_loss: Tensor) -> None:
        """Free what was gathered for nothing; decide, after the first backward."""
        super().post_backward(closure_loss)
        if self._gathers is not None:
            self._gathers.settle()
            if not self._decided and self._context is not None:
                self._gathers.choose(self._fastest(self._context))
                self._decided = True

    def _reshard(self) -> None:
        if self._gathers is not None:
            self._gathers.settle()
        super()._reshard()

    def _close_window(self, *, failed: bool = False) -> None:
        """Leave the blocks to FSDP2."""
        if self._gathers is not None:
            self._gathers.close(failed=failed)
        self._gathers = None

    def _fastest(self, context: Context) -> str:
        """The window by predicted times of the calls of a micro-batch; the same on all ranks."""
        module, mesh = self.lightning_module, self._mesh
        calls = [call for call in context.log.ran if not call.backward]
        if not calls or module is None or mesh is None:
            return "fsdp"
        call = max(calls, key=lambda call: (call.heads * call.head_dim, call.handle))
        load = group_load(context.log.plans[call.handle])
        heads, dims = (call.heads, call.kv_heads), (call.head_dim, call.value_dim)
        sizes = Sizes(call.batch, *heads, *dims, call.itemsize, max(call.itemsize, 4))
        parts: list[Any] = list(sharded_parts(module))
        tokens = max(sequence.length for sequence in context.sequences.values())
        return gather_window(
            tokens=call.batch * tokens,
            pairs=sum(load.work(sizes)) // call.heads,
            width=call.heads * call.head_dim,
            parameters=max(_elements(part) for part in parts if part is not module),
            itemsize=call.itemsize,
            ranks=mesh.topology.dp_shard * mesh.topology.cp,
            cp=context.world,
        )


def _elements(part: nn.Module) -> int:
    return sum(x.numel() for x in part.parameters())
