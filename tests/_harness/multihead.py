"""`nn.MultiheadAttention` in a context of one rank: its input, masks and padding."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.context import Context
from lightning_cp.layout import contiguous
from lightning_cp.sequences import Sequence

SIZE, BATCH, HEADS, WIDTH = 5, 2, 2, 8
KEYS = ((0, 4), (0, 3))
PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)
LATER = torch.ones(SIZE, SIZE, dtype=torch.bool).triu(1)
FLOAT_LATER = torch.zeros(SIZE, SIZE).masked_fill(LATER, float("-inf"))


def context(*, keys: Any = None, module: nn.Module | None = None, size: int = SIZE) -> Context:
    """One rank holds the sequence.

    Args:
        keys: which keys of a row are visible; None: all.
        module: the root module, whose parts refusals name.
        size: number of tokens.
    """
    sequence = Sequence(layout=contiguous(size, 1), length=SIZE, batch=BATCH, keys=keys)
    return Context(
        rank=0,
        world=1,
        group=None,
        meta=None,
        sequences={"s": sequence},
        exchange="ring",
        module=None if module is None else weakref.ref(module),
    )


def mha(**options: Any) -> nn.MultiheadAttention:
    """A module with the same parameters at every call."""
    torch.manual_seed(1)
    return nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})


def rows() -> Tensor:
    """The input `[B, S, C]`, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, SIZE, WIDTH, generator=generator, requires_grad=True)
