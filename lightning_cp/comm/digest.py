"""Agreement: every rank of a group must hold the same integers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.comm.failure import named
from lightning_cp.errors import MismatchError


class Digest:
    """One fixed-size MAX all-reduce of named integers and their negatives.

    Every rank passes the same names in the same order, unconditionally. Integers must fit into 62
    bits. `details` holds the readable value of a field, shown when ranks differ.
    """

    def __init__(self, fields: Mapping[str, int], details: Mapping[str, str], group: Any) -> None:
        self._names, self._details, self._group = list(fields), details, group
        values = torch.tensor(list(fields.values()), dtype=torch.int64)
        self._sent = torch.stack([values, -values])
        with named("the comparison of a micro-step"):
            self._work = dist.all_reduce(
                self._sent, op=dist.ReduceOp.MAX, group=group, async_op=True
            )

    def wait(self) -> None:
        """Wait for the peers and compare.

        Raises:
            MismatchError: on every rank, if any field differs; names the fields and the values of
                every rank.
            PeerError: if a peer failed.
        """
        with named("the comparison of a micro-step"):
            self._work.wait()
            high, low = self._sent[0], -self._sent[1]
            differing = [
                name for name, same in zip(self._names, (high == low).tolist(), strict=True)
                if not same
            ]
            if not differing:
                return
            size = dist.get_world_size(self._group)
            gathered: list[Any] = [None] * size
            shown = {name: self._details.get(name, "differs") for name in differing}
            dist.all_gather_object(gathered, shown, group=self._group)
        lines = [
            f"  {name}: "
            + "; ".join(f"rank {rank} has {values[name]}" for rank, values in enumerate(gathered))
            for name in differing
        ]
        raise MismatchError(
            "the ranks of one context-parallel group must work on the same micro-batch, but they "
            "disagree:\n" + "\n".join(lines)
        )
