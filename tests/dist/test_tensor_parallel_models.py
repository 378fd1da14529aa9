"""Models of transformers, compiled blocks and torch's own attention layers with shared layers."""

from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from lightning_cp.fsdp import whole
from tests._harness import hf
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import pool_trainer

pytestmark = [pytest.mark.dist, needs_sharding]

STEPS, WIDTH = 3, 16
OUT, IN = ColwiseParallel, RowwiseParallel
LLAMA = {
    "self_attn.q_proj": OUT,
    "self_attn.k_proj": OUT,
    "self_attn.v_proj": OUT,
    "self_attn.o_proj": IN,
    "mlp.gate_proj": OUT,
    "mlp.up_proj": OUT,
    "mlp.down_proj": IN,
}


class Found(NamedTuple):
    """What a run left, how many parameters ranks shared that share layers, and compiled graphs."""

    losses: list[float]
    parameters: dict[str, Tensor]
    cut: int
    graphs: int


class Trained(pl.LightningModule):
    """Shares the layers of its blocks itself, and compiles them where asked for."""

    plan: ClassVar[dict[str, type[ParallelStyle]]]

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.compiled, self.losses, self.cut = compiled, list[float](), 0
        self.model = self.made()

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is not None:
            for block in self.blocks():
                styles = {name: style() for name, style in self.plan.items()}
                parallelize_module(block, mesh["tensor_parallel"], styles)
            self.cut = sum(isinstance(x, DTensor) for x in self.parameters())
        if self.compiled:
            for block in self.blocks():
                block.compile(backend="aot_eager")

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Llama(Trained):
    """With the plan that its users write."""

    plan = LLAMA

    def made(self) -> nn.Module:
        return hf.build("llama")

    def blocks(self) -> Any:
        return self.model.model.layers

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class Block(nn.Module):
    """Torch's own attention layer, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Multihead(Trained):
    """Shares the MLP alone: every rank has the whole attention layer."""

    plan: ClassVar = {"up": OUT, "down": IN}

    def made(self) -> nn.Module:
        torch.manual_seed(3)
        embedding, head = nn.Embedding(hf.VOCABULARY, WIDTH), nn.Linear(WIDTH, hf.VOCABULARY)
        return nn.Sequential(embedding, nn.Sequential(Block(), Block()), head)

    def blocks(self) -> Any:
        return self.model[1]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).mT, batch["labels"])


class CutOutside(Multihead):
    """Cuts the last layer of the attention layer, which is called as none."""

    plan: ClassVar = {"up": OUT, "down": IN, "attention.out_proj": IN}


def fit(
    rank: int, world: int, kind: type[Trained], compiled: bool, options: dict[str, Any] | None
) -> Found:
    model = kind(compiled)
    rows = [{"input_ids": row, "labels": row} for row in hf.tokens(STEPS)]
    strategy = "auto" if options is None else ContextParallelStrategy(**options)
    run = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true")
    counters.clear()
    with hf.in_double():
        run.fit(model, DataLoader(rows))
    parameters = whole({name: x.detach() for name, x in model.named_parameters()}, keep=True)
    return Found(model.losses, parameters, model.cut, counters["stats"]["unique_graphs"])


def options(stage: int) -> dict[str, Any]:
    return {"context_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": stage}


@pytest.mark.parametrize(
    ("kind", "compiled", "stage"),
    [
        (Llama, False, 3),
        (Multihead, False, 2),
        pytest.param(Llama, False, 1, marks=pytest.mark.full),
        pytest.param(Llama, True, 3, marks=pytest.mark.full),
        pytest.param(Multihead, True, 3, marks=pytest.mark.full),
    ],
)
def test_three_steps(kind, compiled, stage, pool):
    (expected,) = pool.run(fit, kind, False, None, world=1)
    for found in pool.run(fit, kind, compiled, options(stage), world=4, timeout=100):
        assert found.cut >= 2 * len(kind.plan)
        assert (found.graphs > 0) == compiled
        assert_close(found.losses, expected.losses, rtol=0, atol=1e-12)
        assert_close(found.parameters, expected.parameters, rtol=0, atol=1e-12)


def test_attention_layer_that_is_cut(pool):
    for failure in pool.failures(fit, CutOutside, False, options(3), world=4):
        assert failure.kind == "RefusedError", failure.trace
        assert "of nn.MultiheadAttention out_proj_weight are cut between ranks" in failure.message
