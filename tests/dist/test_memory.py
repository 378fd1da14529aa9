"""The memory of a training step on a long row, and the largest tensor that it makes."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from lightning_cp.diagnostics.trace import MemoryTracker
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + hidden


class Model(nn.Module):
    """A small language model without positions."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


WIDE = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 256}
DEEP = {"layers": 16, "width": 32, "heads": 1, "vocabulary": 64}


def run_peak(rank: int, world: int, exchange: str, length: int, sizes: dict[str, int]) -> int:
    """Peak bytes of forward and backward of one row, without parameters and their gradients."""
    with one_group(rank, world, exchange=exchange) as parallel:
        torch.manual_seed(0)
        model = Model(**sizes).bfloat16()
        ids = torch.arange(length).remainder(sizes["vocabulary"]).unsqueeze(0)
        shard = parallel.shard({"input_ids": ids, "labels": ids.clone()}, module=model)
        tracker = MemoryTracker(model.parameters())
        with parallel.active(shard), tracker:
            model(**shard.batch).backward()
        tracker.close()
        return tracker.peak


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_peak_falls_with_the_group(pool: Pool) -> None:
    length = 32768
    (alone,) = pool.run(run_peak, "direct", length, WIDE, world=1, timeout=600)
    for exchange in ("ring", "direct"):
        for world, limit in ((2, 0.57), (4, 0.33)):
            peaks = pool.run(run_peak, exchange, length, WIDE, world=world, timeout=600)
            print(f"{exchange}, {world} ranks: {max(peaks) / alone:.3f} of {alone / 2**20:.0f} MiB")
            assert max(peaks) <= limit * alone, f"{exchange}, {world} ranks: {peaks} of {alone}"


class Trained(pl.LightningModule):
    """Counts the bytes of what it trains that are held by this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(**DEEP)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        trained = list(self.parameters())
        states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
        kinds = trained, [x.grad for x in trained], states
        self.held = [sum(own(x).nbytes for x in kind) for kind in kinds]


def own(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def run_held(rank: int, world: int, options: dict[str, Any] | None) -> list[int]:
    """Bytes of parameters, gradients and state of AdamW after a step."""
    ids = torch.arange(64)
    strategy = "auto" if options is None else ContextParallelStrategy(**options)
    model = Trained()
    run = pool_trainer(rank, world, strategy, max_epochs=1)
    run.fit(model, DataLoader([{"input_ids": ids, "labels": ids}]))
    return model.held


@needs_sharding
@pytest.mark.full
@pytest.mark.timeout(900)
def test_table_of_all_bytes(pool: Pool) -> None:
    """What a rank holds between steps, and what a step on 32,768 tokens makes."""
    plain: list[int]
    (plain,) = pool.run(run_held, None, world=1)
    (alone,) = pool.run(run_peak, "direct", 32768, DEEP, world=1, timeout=400)
    peak = max(pool.run(run_peak, "direct", 32768, DEEP, world=4, timeout=400))
    print("| ranks | parameters | gradients | state of AdamW | together | activations |")
    show(1, plain, sum(plain), alone, alone)
    for world, made in ((2, None), (4, peak)):
        options = {"context_parallel_size": world, "zero_stage": 3}
        held = max(pool.run(run_held, options, world=world), key=sum)
        show(world, held, sum(plain), made, alone)
        assert sum(held) <= 1.05 * sum(plain) / world
    assert peak <= 0.30 * alone


def show(world: int, held: list[int], plain: int, made: int | None, alone: int) -> None:
    """A row, with shares of what one process has."""
    shares = [f"{sum(held):,} ({sum(held) / plain:.3f})"]
    shares.append("" if made is None else f"{made:,} ({made / alone:.3f})")
    print("|", " | ".join([str(world), *(f"{x:,}" for x in held), *shares]), "|")


class Largest(MemoryTracker):
    """Elements of the largest tensor that an operator returns."""

    elements = 0

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)


def run_largest(rank: int, world: int, exchange: str, length: int, vocabulary: int) -> int:
    with one_group(rank, world, exchange=exchange) as parallel:
        model = Model(layers=1, width=16, heads=2, vocabulary=vocabulary)
        ids = torch.arange(length).remainder(vocabulary).unsqueeze(0)
        shard = parallel.shard({"input_ids": ids, "labels": ids.clone()}, module=model)
        largest = Largest()
        with parallel.active(shard), largest:
            model(**shard.batch).backward()
        return largest.elements


@pytest.mark.parametrize("exchange", ["ring", "direct", "allgather"])
def test_no_tensor_of_all_pairs_nor_of_all_logits(exchange: str, pool: Pool) -> None:
    length, vocabulary, world = 1200, 1000, 3
    for found in pool.run(run_largest, exchange, length, vocabulary, world=world):
        # The largest are the logits of a rank's own tokens.
        assert found == length // world * vocabulary
        assert found < min(length * vocabulary, length * length) // 2
