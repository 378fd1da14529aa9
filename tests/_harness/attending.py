"""A small model whose attention a test gives, and its comparison with one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp import ContextParallel

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 22, 4, 2, 5
EDGES = ((0, 1, 9, 10, 22), (0, 15, 16, 22))
"""Documents of each row."""

Batch = dict[str, Tensor]


class Attending(nn.Module):
    """Embedding, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.q = nn.Linear(12, HEADS * SIZE)
        self.kv = nn.Linear(12, 2 * KV_HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, 30)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Attention of `[B, S, heads, D]`, in the same shape or with the heads side by side."""
        raise AssertionError("the test gives it")

    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        """Attention of embeddings: `[B, S, H * D]`."""
        q = self.q(x).unflatten(-1, (HEADS, SIZE))
        k, v = self.kv(x).unflatten(-1, (2, KV_HEADS, SIZE)).unbind(2)
        return self.attended(q, k, v, batch).flatten(2)

    def forward(self, batch: Batch) -> Tensor:
        """Logits."""
        found: Tensor = self.head(self.mixed(self.embed(batch["input_ids"]), batch))
        return found


def text(*, documents: bool = False) -> Batch:
    """Tokens and labels; with documents their positions and the edges of all rows in one."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(30, (ROWS, LENGTH + 1), generator=generator)
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    if documents:
        spans = [torch.tensor(edges).diff().tolist() for edges in EDGES]
        rows = [torch.cat([torch.arange(n) for n in row]) for row in spans]
        batch["position_ids"] = torch.stack(rows)
        edges = [0, *(row * LENGTH + edge for row in range(ROWS) for edge in EDGES[row][1:])]
        batch["edges"] = torch.tensor(edges, dtype=torch.int32)
    return batch


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten())


def second_step(parallel: ContextParallel, model: nn.Module, batch: Batch) -> Tensor:
    """The loss and, in the model, gradients of a step after the first one, which is audited."""
    for _ in range(2):
        model.zero_grad()
        shard = parallel.shard(batch, module=model)
        with parallel.active(shard):
            loss = loss_of(model, shard.batch)
            loss.backward()
        parallel.check(shard, loss)
    return loss


def assert_gradients(model: nn.Module, expected: nn.Module, *, world: int, name: Any = "") -> None:
    """The mean over ranks of every gradient is that of one device; all ranks call."""
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None, name
        dist.all_reduce(one.grad)
        torch.testing.assert_close(
            one.grad / world, other.grad, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}"
        )


def assert_loss(loss: Tensor, reference: Tensor, name: str = "") -> None:
    """The loss is that of one device."""
    assert loss.item() == pytest.approx(reference.item(), abs=1e-12), name
