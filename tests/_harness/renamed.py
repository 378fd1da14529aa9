"""A process in which `pytorch_lightning` has the names of `lightning.pytorch`: tests of both."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LIGHTNING, OTHER = "lightning.pytorch", "pytorch_lightning"
PACKAGES = (LIGHTNING, OTHER)

NAMES = {
    LIGHTNING: OTHER,
    "lightning.fabric": "lightning_fabric",
    "lightning_cp.plugin.strategy": "lightning_cp.plugin.pytorch_lightning",
}
"""Modules, and those that stand for them."""


class Renamed(MetaPathFinder, Loader):
    """Finds a module under the name of the one that it stands for."""

    def __init__(self) -> None:
        self._own: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Found here, if another one stands for it."""
        return None if standing_for(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The other module itself."""
        module = import_module(standing_for(spec.name) or spec.name)
        self._own[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name, which it keeps."""
        if module.__spec__ is not None:
            module.__spec__ = self._own[module.__spec__.name]


def standing_for(name: str) -> str | None:
    """The module that stands for one of this name, None where that is itself."""
    for old, new in NAMES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def rename() -> None:
    """From here on this process finds `pytorch_lightning` where it asks for `lightning.pytorch`."""
    for name in [name for name in sys.modules if standing_for(name) is not None]:
        del sys.modules[name]
    sys.meta_path.insert(0, Renamed())
