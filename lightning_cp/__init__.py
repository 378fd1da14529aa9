"""Context parallelism for Lightning: sequences longer than one device can hold.

Importing this package registers the strategy `"context_parallel"`.
"""

from lightning_cp import functional
from lightning_cp.api import ContextParallel
from lightning_cp.attention import attend
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plugin import ContextParallelStrategy
from lightning_cp.verification import verify

__version__ = "0.1.0"

__all__ = [
    "ContextParallel",
    "ContextParallelStrategy",
    "Layout",
    "Mask",
    "attend",
    "functional",
    "verify",
]
