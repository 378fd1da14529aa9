"""The Lightning strategy and its monitor; importing this registers the names of the strategy.

They are registered in whichever Lightning is there; one that is not imported yet gets them once it
is. No Lightning is imported before a class is asked for, so that each of `lightning` and
`pytorch_lightning` works without the other.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from _lightning_cp_autoload import HOMES, register

__all__ = ["ContextParallelMonitor", "ContextParallelStrategy"]

if TYPE_CHECKING:
    from lightning_cp.plugin.strategy import ContextParallelMonitor, ContextParallelStrategy
else:

    def __getattr__(name: str) -> Any:
        """A class for the Lightning in use; with both, of `lightning.pytorch`."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_home()), name)


def _home() -> str:
    """Module of the strategy for the package that is imported, else for the one that is there."""
    packages = {home.rpartition(".")[0]: module for home, module in HOMES.items()}
    found = [name for name in packages if name in sys.modules]
    found += [name for name in packages if find_spec(name.partition(".")[0]) is not None]
    return packages[found[0]] if found else next(iter(packages.values()))


register()
