"""Says which attention calls are computed slowly, and why."""

import warnings

from lightning_cp.context import Context
from lightning_cp.errors import ContextParallelWarning


def warn_of_reference(context: Context) -> bool:
    """Warn, on the first rank, of calls of a step that "auto" gave to the slow reference.

    Args:
        context: of the step, which has run.

    Returns:
        Whether there were any.
    """
    kinds = [x for x in context.log.kernels if x.kernel == "reference"]
    if context.kernel != "auto" or not kinds:
        return False
    if context.rank == 0:
        terms = ", ".join(dict.fromkeys(term for kind in kinds for term in kind.terms))
        reasons = "; ".join(dict.fromkeys(reason for kind in kinds for reason in kind.passed))
        warnings.warn(
            f"attention_backend='auto' took the reference, which is slow, for calls with {terms}: "
            f"{reasons}; say attention_backend='reference' if that is fine, or leave these terms "
            f"out",
            ContextParallelWarning,
            stacklevel=3,
        )
    return True
