"""The audit: operations in a first forward that would be silently wrong on a shard."""

from lightning_cp.diagnostics.audit.mode import Audit
from lightning_cp.diagnostics.audit.tokens import SMALLEST

__all__ = ["SMALLEST", "Audit"]
