"""What collectives of user code do on one device: nothing."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.compat import finished_work


class OneDevice(TorchDispatchMode):
    """Lets all-reduces and broadcasts return at once, as in a job of one rank.

    For running a step as one device would while other ranks do the same: sums over ranks would
    count every token once per rank. Other collectives are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code may run, and be compiled, under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a collective, or run any other operator."""
        if func.overloadpacket in (torch.ops.c10d.allreduce_, torch.ops.c10d.broadcast_):
            return args[0], finished_work()
        return func(*args, **(kwargs or {}))
