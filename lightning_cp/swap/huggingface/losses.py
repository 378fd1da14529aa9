"""Losses of transformers that shift labels: the next token may lie on another rank."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from lightning_cp import functional
from lightning_cp.context import SLOT

Loss = Callable[..., Tensor]


def shifts(loss: Loss) -> bool:
    """Whether a loss shifts its `labels` unless it is given `shift_labels`."""
    names = inspect.signature(loss).parameters
    return "labels" in names and "shift_labels" in names


def shifting_globally(loss: Loss) -> Loss:
    """A loss that shifts labels, with labels shifted over the whole row in a context.

    Every rank passes the labels of its own tokens `[B, S_local]`; the target of a token is the
    label of the next global position, `ignore_index` for the last. `shift_labels` that are given
    are used as they are.
    """
    names = tuple(inspect.signature(loss).parameters)
    place = names.index("shift_labels")

    @wraps(loss)
    def shifted(*args: Any, **kwargs: Any) -> Tensor:
        if SLOT.current is None:
            return loss(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs  # a signature cannot be traced
        labels = given.get("labels")
        if labels is not None and given.get("shift_labels") is None:
            ignored = given.get("ignore_index", -100)
            moved = functional.shift_labels(labels, ignore_index=ignored)
            if place < len(args):
                args = (*args[:place], moved, *args[place + 1 :])
            else:
                kwargs = {**kwargs, "shift_labels": moved}
        return loss(*args, **kwargs)

    return shifted
