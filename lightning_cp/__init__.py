"""Context parallelism for Lightning: sequences longer than one device can hold.

Importing this package registers the strategy `"context_parallel"`.
"""

import typing

from lightning_cp import functional, plugin
from lightning_cp.api import ContextParallel
from lightning_cp.attention import attend
from lightning_cp.data.collate import ContextParallelCollate
from lightning_cp.data.sampler import ContextParallelSampler
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.recomputation import checkpoint_policy
from lightning_cp.verification import verify

if typing.TYPE_CHECKING:
    from lightning_cp.plugin import ContextParallelMonitor, ContextParallelStrategy
else:

    def __getattr__(name: str) -> typing.Any:
        """A class for the Lightning in use, which is imported only here."""
        if name not in plugin.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(plugin, name)


__version__ = "0.1.0"

__all__ = [
    "ContextParallel",
    "ContextParallelCollate",
    "ContextParallelMonitor",
    "ContextParallelSampler",
    "ContextParallelStrategy",
    "Layout",
    "Mask",
    "attend",
    "checkpoint_policy",
    "functional",
    "verify",
]
