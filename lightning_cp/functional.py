"""Small functions for model code that must know it works on a part of the sequence.

Outside an active context each has its single-device meaning, so model code that calls them needs
no switch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_cp.context import SLOT


def positions(size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Global positions of this rank's tokens, in place of `torch.arange(size)`.

    Args:
        size: number of local tokens, the size of the sequence dimension that the model sees.
        device: device of the result.

    Returns:
        int64 `[size]`. Inside a context: where in the whole sequence each local token lies (0 for
        dummy tokens that fill up short sequences). Outside: `0, 1, ..., size - 1`.

    Raises:
        RefusedError: if `size` is not this rank's share of a declared sequence.
    """
    anchor = torch.empty(0, device=device)
    found: Tensor = torch.ops.lightning_cp.positions(anchor, size)
    return found


@contextmanager
def local() -> Iterator[None]:
    """Code inside works on this rank's tensors alone, as if there were no other ranks.

    For parts of a step that are meant to be local: a frozen teacher on replicated inputs,
    attention within one frame, generation in a callback. Attention and losses inside are not
    swapped, and nothing is checked.
    """
    with SLOT.suspend():
        yield


@torch.library.custom_op("lightning_cp::positions", mutates_args=())
def _positions(anchor: Tensor, size: int) -> Tensor:
    context = SLOT.current
    if context is None:
        return torch.arange(size, device=anchor.device)
    sequence = context.sequence_of(size)
    found = sequence.layout.positions(context.rank)
    found.masked_fill_(found >= sequence.length, 0)
    return found.to(anchor.device)


@_positions.register_fake
def _(anchor: Tensor, size: int) -> Tensor:
    return anchor.new_empty(size, dtype=torch.int64)
