"""Whole modules that are compiled: changing lengths, recomputation, local code, Hugging Face."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lightning_cp import checkpoint_policy, functional
from lightning_cp.api import ContextParallel
from tests._harness.group import one_group
from tests._harness.hf import build
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

WIDTH, HEADS, LAYERS = 8, 2, 2
LENGTHS = (9, 12, 31, 10, 17, 8, 23, 14, 40, 11, 26, 13, 19, 33, 15, 28, 37, 16, 21, 9)
Batch = dict[str, Tensor]


class Layer(nn.Module):
    """Attention with a residual, and with `local` attention that stays on a rank besides."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self.local = local
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.local:
            with functional.local():
                frames = (y[:, :, :2] for y in (q, k, v))
                mixed = mixed + F.scaled_dot_product_attention(*frames).mean()
        found: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Model(nn.Module):
    """Embedding, layers, head and loss; layers are `recomputed`, with their attention `kept`."""

    def __init__(self, recomputed: bool = False, kept: bool = False, local: bool = False) -> None:
        super().__init__()
        self.recomputed, self.kept = recomputed, kept
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.layers = nn.ModuleList(Layer(local) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.kept:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_policy())
            elif self.recomputed:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _model(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).double()


def _llama(recomputed: bool = False, kept: bool = False) -> nn.Module:
    model: Any = build("llama")
    if recomputed:
        enable = getattr(model, "activation_checkpointing_enable", None)
        keep = {"context_fn": checkpoint_policy()} if kept else {}
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **keep})
    found: nn.Module = model
    return found


def _batch(length: int) -> Batch:
    drawn = torch.randint(20, (2, length + 1), generator=torch.Generator().manual_seed(length))
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    found = model(**batch)
    return found if isinstance(found, Tensor) else found.loss


def _compared(
    parallel: ContextParallel, eager: nn.Module, compiled: nn.Module, lengths: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Attention calls in forward and backward of the compiled model, which is like the eager."""
    counted = []
    for length in lengths:
        losses = []
        for model in (eager, compiled):
            model.zero_grad()
            shard = parallel.shard(_batch(length), module=model)
            with parallel.active(shard):
                loss = _loss(model, shard.batch)
                forward = shard.context.log.attention
                loss.backward()
            parallel.check(shard, loss)
            losses.append(loss.item())
        counted.append((forward, shard.context.log.attention - forward))
        assert losses[1] == pytest.approx(losses[0], abs=1e-12), length
        for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(
                other.grad, one.grad, rtol=0, atol=1e-12, msg=f"{name} at length {length}"
            )
    return counted


def _lengths(
    rank: int, world: int, backend: str, options: dict[str, bool], lengths: tuple[int, ...]
) -> int:
    """Graphs of a whole model with its loss."""
    counter = CompileCounterWithBackend(backend)
    with one_group(rank, world) as parallel:
        compiled = _model(**options)
        compiled.compile(backend=counter, fullgraph=True)
        counted = _compared(parallel, _model(**options), compiled, lengths)
    again = LAYERS if options.get("recomputed") and not options.get("kept") else 0
    assert counted == [(LAYERS, again)] * len(lengths)
    return int(counter.frame_count)


WAYS: dict[str, dict[str, bool]] = {
    "whole": {},
    "recomputed": {"recomputed": True},
    "kept": {"recomputed": True, "kept": True},
    "local": {"local": True},
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.timeout(240)
def test_one_graph_for_all_lengths(pool: Pool, name: str) -> None:
    lengths = LENGTHS if name == "whole" else LENGTHS[:4]
    graphs = pool.run(_lengths, "aot_eager", WAYS[name], lengths, world=2, timeout=110)
    assert max(graphs) <= 2, "one for the first length, one for any"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_inductor(pool: Pool, world: int, name: str) -> None:
    graphs = pool.run(_lengths, "inductor", WAYS[name], LENGTHS, world=world, timeout=500)
    # One of the first length, one of all others; and one more where a rank's share of a length is
    # by chance the size of another dimension, which the compiler then takes for the same.
    assert max(graphs) <= 3


def _hugging_face(
    rank: int, world: int, options: dict[str, bool], blocks: bool, lengths: tuple[int, ...]
) -> int:
    """Graphs of a whole model, or of its blocks, without a break."""
    counter = CompileCounterWithBackend("aot_eager")
    with one_group(rank, world) as parallel:
        compiled = _llama(**options)
        parts: Any = compiled.get_submodule("model.layers") if blocks else [compiled]
        for part in parts:
            part.compile(backend=counter, fullgraph=True)
        counted = _compared(parallel, _llama(**options), compiled, lengths)
    again = LAYERS if options.get("recomputed") and not options.get("kept") else 0
    assert counted == [(LAYERS, again)] * len(lengths)
    return int(counter.frame_count)


@pytest.mark.full
@pytest.mark.parametrize("name", ["whole", "recomputed", "kept"])
@pytest.mark.timeout(240)
def test_model_of_hugging_face(pool: Pool, name: str) -> None:
    graphs = pool.run(_hugging_face, WAYS[name], False, LENGTHS[:3], world=2, timeout=110)
    assert max(graphs) <= 4, "of its hook and of its forward, as many as of any module"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["whole", "recomputed"])
@pytest.mark.parametrize("blocks", [True, False])
def test_graphs_of_hugging_face_hold_for_all_lengths(pool: Pool, blocks: bool, name: str) -> None:
    graphs = pool.run(_hugging_face, WAYS[name], blocks, LENGTHS, world=2, timeout=500)
    assert max(graphs) <= (2 if blocks else 4)
