"""Collectives that user code issues itself: a warning, once for every line."""

import warnings
from types import FrameType
from typing import Any

import torch

from lightning_cp.compat import ranks_of
from lightning_cp.context import Context
from lightning_cp.diagnostics.audit.call import Call
from lightning_cp.diagnostics.audit.origin import PLUMBING, line_of_model
from lightning_cp.errors import ContextParallelWarning
from lightning_cp.swap.where import caller

NAMES = {
    "all_reduce": (
        "allreduce_ allreduce_coalesced_",
        "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    ),
    "reduce": ("reduce_", ""),
    "reduce_scatter": (
        "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    ),
    "all_gather": (
        "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    ),
    "gather": ("gather_", ""),
}
"""What adds up or collects, with its operators in c10d and in the functional collectives."""


def _table() -> dict[Any, str]:
    spaces = torch.ops.c10d, torch.ops._c10d_functional
    return {
        getattr(space, operator): name
        for name, listed in NAMES.items()
        for space, operators in zip(spaces, listed, strict=True)
        for operator in operators.split()
        if hasattr(space, operator)
    }


COLLECTIVES = _table()
"""From operator to the name that users know."""


class Collectives:
    """Warns of collectives of the model's own that reach over peers.

    Args:
        context: the context of the step.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: set[tuple[str, int]] = set()

    def look(self, call: Call) -> None:
        """Judge one call, which is in `COLLECTIVES`; it runs in any case."""
        frame = line_of_model(PLUMBING)
        if frame is None or not self._reaches_peers(call):
            return
        line = frame.f_code.co_filename, frame.f_lineno
        if line not in self._seen:
            self._seen.add(line)
            self._warn(frame, COLLECTIVES[call.func.overloadpacket])

    def _reaches_peers(self, call: Call) -> bool:
        """Whether the group of a collective holds more than one rank of the context's group."""
        peers = ranks_of(self._context.group)
        given = call.get("process_group")
        group = call.get("group_name") if given is None else given
        return len(set(peers) & set(ranks_of(group))) > 1

    def _warn(self, frame: FrameType, name: str) -> None:
        cp = self._context.world
        message = (
            f"{caller(self._context)}: torch.distributed.{name} over ranks of which {cp} share "
            f"each sequence. A swapped loss is that of the whole sequence on all {cp} of them, and "
            f"they have the same rows: adding up such values counts each token {cp} times. Leave a "
            f"swapped loss as it is; add up local tokens with "
            f"lightning_cp.functional.sequence_sum or sequence_mean; collect what belongs to rows "
            f"with self.all_gather or strategy.all_gather, which are over the "
            f"strategy.data_parallel_size virtual devices and not over all ranks "
            f"(strategy.data_parallel_rank says which of them this is)"
        )
        warnings.warn_explicit(
            message, ContextParallelWarning, frame.f_code.co_filename, frame.f_lineno
        )
