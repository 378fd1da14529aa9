"""Gives Lightning the names of our strategies, the moment a process imports Lightning.

`import torch` calls `register` (entry point group `torch.backends`), unless the environment has
torch's `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, and so does `import lightning_cp`. Nothing may be raised.
"""

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

HOMES = {
    "lightning.pytorch.strategies": "lightning_cp.plugin.strategy",
    "pytorch_lightning.strategies": "lightning_cp.plugin.pytorch_lightning",
}
PRESETS: dict[str, Any] = {f"context_parallel_zero{n}": {"zero_stage": n} for n in range(4)}
PRESETS["context_parallel"] = {}


def _make(home: str, **options: Any) -> Any:
    return import_module(home).ContextParallelStrategy(**options)


def _add(module: Any, _ran: None = None) -> None:
    with suppress(Exception):
        for name, options in PRESETS.items():
            if name not in module.StrategyRegistry:
                make, about = partial(_make, HOMES[module.__name__]), "Ranks share sequences"
                module.StrategyRegistry.register(name, make, about, **options)


class _Finder:
    @staticmethod
    def find_spec(name: str, *where: Any) -> Any:
        with suppress(Exception):
            others = (f for f in sys.meta_path if name in HOMES and f is not _Finder)
            spec: Any = next(filter(None, (f.find_spec(name, *where) for f in others)), None)
            if run := spec and spec.loader.exec_module:
                spec.loader.exec_module = lambda module: _add(module, run(module))
            return spec


def register() -> None:
    """Register in every Lightning that is loaded, and in the others once they are."""
    with suppress(Exception):
        sys.meta_path[:0] = [_Finder] if _Finder not in sys.meta_path else []
        for name in HOMES.keys() & sys.modules.keys():
            _add(sys.modules[name])
