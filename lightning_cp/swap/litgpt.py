"""LitGPT's `GPT` on a part of the sequence: its rotary tables are read at global positions.

Nothing here imports litgpt: a process that never did has no such models.
"""

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from lightning_cp import functional
from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.swap.where import caller

TABLES = ("cos", "sin")
"""Buffers `[N, ...]` of which a forward takes as many rows as it has tokens."""


class LitGPT:
    """What is hooked into models of litgpt, until `remove`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._known: WeakSet[nn.Module] = WeakSet()
        self._tables: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()

    def prepare(self, module: nn.Module | None) -> None:
        """Hook the models within a module; those that are hooked already stay as they are.

        Args:
            module: the user's root module, or None.
        """
        place: Any = sys.modules.get("litgpt.model")
        if place is None or module is None:
            return
        for part in module.modules():
            if isinstance(part, place.GPT) and part not in self._known:
                self._known.add(part)
                before = part.register_forward_pre_hook(self._enter, with_kwargs=True)
                after = part.register_forward_hook(self._leave, always_call=True)
                self._undo += [before.remove, after.remove]

    def remove(self) -> None:
        """Take the hooks out; calling it again does nothing."""
        while self._undo:
            self._undo.pop()()
        self._known.clear()

    def _enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the rows of this rank's positions first for the time of a forward."""
        context = SLOT.current
        if context is None:
            return
        if kwargs.get("input_pos", args[1] if len(args) > 1 else None) is not None:
            raise RefusedError(
                f"{caller(context)}: input_pos reads a cache of keys of whole sequences, and this "
                f"rank has a part of one; leave it out, the positions of the tokens are known, or "
                f"generate in functional.local(), on whole rows"
            )
        size = (args[0] if args else kwargs["idx"]).shape[1]
        length = context.held(size).length
        if length > model.max_seq_length:
            raise RefusedError(
                f"{caller(context)}: sequences of {length} tokens, but max_seq_length is "
                f"{model.max_seq_length}; set it (at most block_size), or pass shorter rows"
            )
        whole = {name: getattr(model, name) for name in TABLES}
        places = functional.positions(size, device=whole["cos"].device)
        self._tables[model] = whole
        for name, table in whole.items():
            setattr(model, name, table[places])

    def _leave(self, model: Any, args: Any, output: Any) -> None:
        for name, table in self._tables.pop(model, {}).items():
            setattr(model, name, table)
