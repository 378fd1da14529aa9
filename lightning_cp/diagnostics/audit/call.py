"""One call of an operator, and what a rule says about it."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from lightning_cp.diagnostics.audit.tokens import Tokens


class Finding(NamedTuple):
    """Why a call is refused: what it does and why that is wrong, and the way out."""

    what: str
    way_out: str


class Call(NamedTuple):
    """One call of an operator as a dispatch mode sees it, and the tokens of the step."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tokens

    @property
    def name(self) -> str:
        """The operator's name without the marks of variants: `max_pool` of `aten::_max_pool_`."""
        return str(self.func.overloadpacket.__name__).strip("_")

    def get(self, name: str) -> Any:
        """The argument called `name` in the operator's schema, its default where it is not given.

        None if the operator has no such argument.
        """
        place, default = _places(self.func).get(name, (len(self.args), None))
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def tensor(self, place: int = 0) -> Tensor | None:
        """The positional argument at `place` if it is a tensor."""
        found = self.args[place] if place < len(self.args) else None
        return found if isinstance(found, Tensor) else None


Rule = Callable[[Call], Finding | None]


@cache
def _places(func: Any) -> dict[str, tuple[int, Any]]:
    return {
        argument.name: (place, argument.default_value if argument.has_default_value() else None)
        for place, argument in enumerate(func._schema.arguments)
    }
