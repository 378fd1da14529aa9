"""Unchanged modules on shards, under the swap, equal themselves on the whole sequence."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_cp import functional
from lightning_cp.swap._torch import OPERATORS, has_override, keys
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

BATCH, LENGTH, WIDTH, HEADS = 2, 10, 8, 2
Batch = dict[str, Tensor]


class Decoder(nn.Module):
    """Projections around attention that was imported by name; positions from the library."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        x = inputs_embeds + self.positions(functional.positions(inputs_embeds.shape[1]))
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)
        )
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Checkpointed(Decoder):
    """Recomputes everything in the backward."""

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            super().forward, inputs_embeds, attention_mask, use_reentrant=False
        )
        return found


class Encoder(nn.Module):
    """`nn.TransformerEncoderLayer` with the batch's padding, which it hands to its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs_embeds, src_key_padding_mask=attention_mask == 0)
        return found


class CausalMHA(nn.Module):
    """`nn.MultiheadAttention` that says it is causal and wants no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        size = inputs_embeds.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        x = inputs_embeds
        found: Tensor = self.attn(x, x, x, need_weights=False, attn_mask=later, is_causal=True)[0]
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "by-name": Decoder,
    "checkpointed": Checkpointed,
    "encoder": Encoder,
    "encoder-eval": lambda: Encoder().eval(),
    "mha": CausalMHA,
    "mha-eval": lambda: CausalMHA().eval(),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]()
    return model.double()


def batch(name: str) -> Batch:
    """Whole inputs; rows of an encoder's batch are padded differently, on either side."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    if name.startswith("encoder"):
        mask[0, 8:], mask[1, :3] = 0, 0
    return {"inputs_embeds": inputs, "attention_mask": mask}


def loss_of(out: Tensor, mask: Tensor) -> Tensor:
    """A sum over real tokens: adding up the ranks gives that of the whole sequence."""
    return (out.square() * (mask != 0).unsqueeze(-1)).sum()


def run_models(rank: int, world: int, layout: str, exchange: str) -> bytes:
    """Outputs, put together, and gradients of every model; no-grad and inference outputs too."""
    found = {}
    with one_group(rank, world, layout=layout, exchange=exchange) as parallel:
        for name in MODELS:
            model = built(name)
            shard = parallel.shard(batch(name), module=model)
            with parallel.active(shard):
                out = model(**shard.batch)
                calls = shard.context.log.attention
                loss_of(out, shard.batch["attention_mask"]).backward()
                grads = {key: p.grad for key, p in model.named_parameters()}
                with torch.no_grad():
                    silent = model(**shard.batch)
                with torch.inference_mode():
                    inferred = model(**shard.batch)
                with torch.autocast("cpu", torch.bfloat16):
                    cast = built(name).float()(
                        shard.batch["inputs_embeds"].float(), shard.batch["attention_mask"]
                    )
            outs = [parallel.unshard(x, shard) for x in (out, silent, inferred, cast)]
            found[name] = (calls, outs, grads)
    assert not [n for n in OPERATORS for key in keys("cpu") if has_override(n, key)]
    return pickle.dumps(found)


@pytest.mark.parametrize(
    ("world", "layout", "exchange"),
    [(2, "zigzag", "ring"), (3, "contiguous", "ring"), (3, "zigzag", "allgather")],
)
def test_modules(world: int, layout: str, exchange: str, pool: Pool) -> None:
    ranks = [pickle.loads(x) for x in pool.run(run_models, layout, exchange, world=world)]
    for name in MODELS:
        model, whole = built(name), batch(name)
        out = model(**whole)
        loss_of(out, whole["attention_mask"]).backward()
        real = (whole["attention_mask"] != 0).unsqueeze(-1)
        for rank, found in enumerate(ranks):
            calls, outs, _ = found[name]
            assert calls == 1, f"rank {rank}: {name}: {calls} calls were swapped"
            for kind, got in zip(("train", "no_grad", "inference"), outs, strict=False):
                difference = ((got - out) * real).abs().max().item()
                assert difference < 1e-12, f"rank {rank}: {name}: {kind} is off by {difference}"
            difference = ((outs[3] - out) * real).abs().max().item()
            assert difference < 0.05, f"rank {rank}: {name}: autocast is off by {difference}"
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            total = sum(found[name][2][key] for found in ranks)
            difference = (total - parameter.grad).abs().max().item()
            assert difference < 1e-11, f"{name}: gradient of {key} is off by {difference}"
