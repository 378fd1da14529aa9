"""The dispatch mode that looks at every operator of a first forward."""

from types import FrameType
from typing import Any

from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.compat import in_backward
from lightning_cp.context import SLOT, Context
from lightning_cp.diagnostics.audit.call import Call, Finding
from lightning_cp.diagnostics.audit.collectives import COLLECTIVES, Collectives
from lightning_cp.diagnostics.audit.origin import line_of_model
from lightning_cp.diagnostics.audit.rules import RULES
from lightning_cp.diagnostics.audit.tokens import Tokens
from lightning_cp.errors import RefusedError
from lightning_cp.swap.huggingface import counts_in_vain
from lightning_cp.swap.where import caller


class Audit(TorchDispatchMode):
    """Refuses operations on local tokens whose result depends on where the sequence was cut.

    The table of rules is `rules.RULES`; which dimension is the sequence says `tokens.Tokens`. What
    runs in a backward pass, inside `functional.local()`, inside this package's own operators, and
    in code of libraries that know of the group, is not looked at. Collectives of the model's own
    are warned of.

    Args:
        context: the context of the step.

    Raises:
        RefusedError: from the offending call, on every rank; names the module and the way out.
    """

    supports_higher_order_operators = True

    def __init__(self, context: Context) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context
        self._tokens = Tokens(context)
        self._collectives = Collectives(context)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code may run, and be compiled, while this mode only looks."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at one call of an operator, then run it."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # made by a compiler around others
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in RULES and SLOT.current is not None:
            call = Call(func, args, kwargs, self._tokens)
            finding = RULES[packet](call)
            if finding is not None and not in_backward():
                self._judge(call, finding)
        elif packet in COLLECTIVES and SLOT.current is not None and not in_backward():
            self._collectives.look(Call(func, args, kwargs, self._tokens))
        return func(*args, **kwargs)

    def _judge(self, call: Call, finding: Finding) -> None:
        """Refuse what the model's own code did, if it matters."""
        frame = line_of_model()
        if frame is None or (call.name == "arange" and _in_vain(frame)):
            return
        raise RefusedError(
            f"{caller(self._context)}: {finding.what}; {finding.way_out}, or wrap it in "
            f"lightning_cp.functional.local() if it is meant for this rank's tokens alone"
        )


def _in_vain(frame: FrameType) -> bool:
    """Whether the module whose code a frame runs counts positions that something else replaces."""
    code = frame.f_code
    return bool(code.co_argcount) and counts_in_vain(frame.f_locals.get(code.co_varnames[0]))
