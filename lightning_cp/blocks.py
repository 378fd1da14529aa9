"""The modules within a module whose parameters are gathered together, apart from the others."""

from collections import Counter
from collections.abc import Callable, Collection

from torch import nn

from lightning_cp.errors import ConfigError

WrapPolicy = Collection[type[nn.Module]] | Callable[[nn.Module], bool]
"""Which modules are gathered on their own: classes, or a function of a module."""


def find_blocks(module: nn.Module, wrap: WrapPolicy | None) -> list[nn.Module]:
    """Modules to wrap, inner ones first.

    Args:
        module: the root module.
        wrap: see `WrapPolicy`; None takes the repeated blocks: the children of a `ModuleList` or
            `Sequential` that has two or more of their class, but for those that share a parameter
            with a module outside.

    Raises:
        ConfigError: on every rank alike, if a chosen block shares a parameter with a module
            outside of it.
    """
    if wrap is None:
        found = [part for part in _repeated(module) if not _shared(part, module)]
    else:
        chosen = wrap if callable(wrap) else _is_one_of(tuple(wrap))
        found = [x for x in reversed(list(module.modules())) if x is not module and chosen(x)]
        names = {part: name for name, part in module.named_modules()}
        for part in found:
            if _shared(part, module):
                raise ConfigError(
                    f"auto_wrap_policy: module {names[part]!r} shares a parameter with a module "
                    f"outside of it, and they are gathered at different times; leave it out"
                )
    return [part for part in found if any(True for _ in part.parameters())]


def _is_one_of(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda part: isinstance(part, classes)


def _repeated(module: nn.Module) -> list[nn.Module]:
    """The outermost blocks that a list or sequence holds more than one of."""
    children = list(module.children())
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    counts = Counter(type(child) for child in children) if listed else Counter()
    found: dict[nn.Module, None] = {}
    for child in children:
        callable_ = type(child).forward is not nn.Module.forward
        blocks = [child] if counts[type(child)] > 1 and callable_ else _repeated(child)
        found.update(dict.fromkeys(blocks))
    return list(found)


def _shared(part: nn.Module, root: nn.Module) -> bool:
    """Whether a module outside of `part` has one of its parameters."""
    inside = set(part.modules())
    own = {id(x) for x in part.parameters()}
    outside = (other for other in root.modules() if other not in inside)
    return any(id(x) in own for other in outside for x in other.parameters(recurse=False))
