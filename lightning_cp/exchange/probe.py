"""Where the time of an attention call goes: phases that a caller may measure."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

Phase = Literal["kernel", "merge", "accumulate", "copy", "communication"]


class Probe(Protocol):
    """Is told which phase begins and ends; phases do not nest."""

    def __call__(self, phase: Phase) -> AbstractContextManager[object]: ...


_NOTHING = nullcontext()


def silent(phase: Phase) -> AbstractContextManager[object]:
    """Measures nothing."""
    return _NOTHING
