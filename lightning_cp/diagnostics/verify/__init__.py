"""The verifier: one step with and without context parallelism, compared module by module."""

from lightning_cp.diagnostics.verify.record import Run, run, step_of
from lightning_cp.diagnostics.verify.report import Finding, Report
from lightning_cp.diagnostics.verify.snapshot import unchanged
from lightning_cp.diagnostics.verify.verdict import judge

__all__ = ["Finding", "Report", "Run", "judge", "run", "step_of", "unchanged"]
