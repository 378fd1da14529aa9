"""A whole training step of a small language model on a packed row, under any layout."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp.api import ContextParallel
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.overlap.model import Block
from lightning_cp.cli.bench.packed.settings import Sizes
from lightning_cp.config import Config

WORDS = 256
RATE = 1e-3


class Model(nn.Module):
    """Words, blocks, and a word for every token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.out = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[B, S, WORDS]`."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.out(x)
        return found


class Steps:
    """Steps of one rank.

    Args:
        sizes: of row and model.
        rank: of this process.
        group: process group, which is used for checks as well.
    """

    def __init__(self, sizes: Sizes, *, rank: int, group: Any) -> None:
        torch.manual_seed(0)
        self._sizes, self._group = sizes, group
        self._model = Model(sizes).to(DTYPES[sizes.dtype])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        config = Config(exchange=sizes.exchange, documents="position_ids")
        self._parallel = ContextParallel(
            group, meta=group, rank=rank, world=sizes.ranks, config=config
        )

    def close(self) -> None:
        """Take attention back to what it was."""
        self._parallel.close()

    def __call__(self, layout: str, batch: dict[str, Tensor]) -> Tensor:
        """Cut the row, forward, backward, average gradients, and update; the loss."""
        parallel = self._parallel
        parallel.config = replace(parallel.config, layout=layout)
        shard = parallel.shard(batch, module=self._model)
        with parallel.active(shard):
            logits = self._model(shard.batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), shard.batch["labels"].flatten())
            loss.backward()
        parallel.check(shard, loss)
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self._group)
        parts = flat.div_(self._sizes.ranks).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def batch_of(lengths: Sequence[int], seed: int) -> dict[str, Tensor]:
    """A row `[1, N]` of random words in documents; the last word of a document predicts nothing."""
    dice = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (1, sum(lengths)), generator=dice)
    labels = words.roll(-1, 1)
    labels[0, [edge - 1 for edge in accumulate(lengths)]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": words, "labels": labels, "position_ids": positions}
