"""Rows of tokens, whole and cut, on which the public functions are tried."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.api import ContextParallel, Shard

BATCH, WIDTH, IGNORED = 2, 3, -100
LENGTHS = (1, 2, 7, 10, 24)
WAYS = [(world, layout) for world in (1, 2, 3) for layout in ("contiguous", "zigzag")]


class Data(NamedTuple):
    """Whole tensors, or one rank's part of them: `[B, S, D]`, and masks and labels `[B, S]`."""

    x: Tensor
    mask: Tensor
    weights: Tensor
    labels: Tensor


def data(length: int) -> Data:
    """Values with many ties; the second row's mask hides everything."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64)
    x[..., 0] = torch.randint(3, (BATCH, length), generator=generator)
    mask = torch.rand(BATCH, length, generator=generator) < 0.6
    mask[1] = False
    weights = torch.rand(BATCH, length, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (BATCH, length), generator=generator)
    return Data(x, mask, weights, labels)


def cut(
    context: ContextParallel, whole: Data, *, audited: bool = False
) -> tuple[Shard, Data, Tensor]:
    """The shard, its tensors with NaN at the dummies, and which global position each token has.

    Without the audit, which would take a test's references for mistakes.
    """
    batch = {
        "inputs_embeds": whole.x,
        "labels": whole.labels,
        "loss_mask": whole.weights,
        "token_type_ids": whole.mask,
    }
    shard = context.shard(batch)
    if not audited:
        shard.digest.wait()
        shard = context.shard(batch)
    sequence = shard.cut.sequence
    places = sequence.layout.positions(context.rank)
    kept = sequence.real(context.rank)
    part = shard.batch
    x = torch.where(kept[:, None], part["inputs_embeds"], torch.nan)
    weights = torch.where(kept, part["loss_mask"], torch.nan)
    mask = part["token_type_ids"] | ~kept
    return shard, Data(x, mask, weights, part["labels"]), places[kept]


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal but for rounding in double; the message begins with the name."""
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )
