"""Batches of numbers, cut for every rank and put together again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.data import Cut, cut
from lightning_cp.data.cut import Rules

BATCH = 2
RESETS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])


def tokens(length: int = 8, batch: int = BATCH) -> Tensor:
    """Different numbers everywhere, and no zero."""
    return torch.arange(1, batch * length + 1).reshape(batch, length)


def parts(batch: Any, world: int = 2, **options: Any) -> list[Cut]:
    """What every rank gets, cut contiguously unless `options` of the rules say otherwise."""
    rules = Rules(**{"layout": "contiguous", **options})
    return [cut(batch, rules, rank=rank, world=world) for rank in range(world)]


def whole(found: list[Cut], get: Callable[[Any], Tensor], dim: int = 1) -> Tensor:
    """The cut field put together again, without dummies."""
    sequence = found[0].sequence
    joined = sequence.layout.unshard([get(part.batch) for part in found], dim=dim)
    return joined.narrow(dim, 0, sequence.length)
