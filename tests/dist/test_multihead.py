"""Attention layers of torch.nn on shards, under the swap, equal themselves on whole sequences."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.api import ContextParallel
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

BATCH, WIDTH, HEADS, CLASSES = 2, 8, 2, 11
Batch = dict[str, Tensor]
triangle = nn.Transformer.generate_square_subsequent_mask


class Attend(nn.Module):
    """`nn.MultiheadAttention` called as `call` says."""

    def __init__(self, call: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.call = call
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """`[B, S, E]` and True at padding to `[B, S, E]`."""
        return self.call(self.attn, x, padding)


def default(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    out, _ = attn(x, x, x)
    return out


def padded(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    out, _ = attn(x, x, x, key_padding_mask=padding)
    return out


def padded_float(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    mask = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, float("-inf"))
    return attn(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def time_major(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    out, _ = attn(y, y, y, key_padding_mask=padding)
    return out.transpose(0, 1)


def causal(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    mask = triangle(x.shape[1], dtype=x.dtype)
    return attn(x, x, x, attn_mask=mask, is_causal=True, average_attn_weights=False)[0]


def causal_heads(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    later = torch.ones(BATCH * HEADS, x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return attn(x, x, x, padding, attn_mask=later, is_causal=True, need_weights=False)[0]


def cross(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return attn(x, x[..., :5].sin(), x[..., 2:].cos(), key_padding_mask=padding)[0]


def each_row(attn: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return torch.stack([attn(row, row, row)[0] for row in x])


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, bidirectional with the batch's padding, or causal."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """`[B, S, E]` and True at padding to `[B, S, E]`."""
        given = dict(self.options)
        if given.pop("causal", False):
            given["mask"] = triangle(x.shape[1], dtype=torch.bool)
        if given.pop("padded", False):
            given["src_key_padding_mask"] = padding
        return self.encoder(x, **given)


class Checkpointed(Encoder):
    """Every layer is computed again in the backward."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """`[B, S, E]` and True at padding to `[B, S, E]`."""
        mask = triangle(x.shape[1], dtype=torch.bool)
        for layer in self.encoder.layers:
            x = checkpoint(layer, x, mask, padding, is_causal=True, use_reentrant=False)
        return x


class Decoder(nn.Module):
    """`nn.TransformerDecoder`: causal, with a memory of the same sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """`[B, S, E]` and True at padding to `[B, S, E]`."""
        out = self.decoder(
            x.transpose(0, 1),
            self.memory(x).transpose(0, 1),
            tgt_mask=triangle(x.shape[1], dtype=torch.bool),
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return out.transpose(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "default": (lambda: Attend(default, batch_first=True), 1),
    "padded": (lambda: Attend(padded, batch_first=True), 1),
    "padded float": (lambda: Attend(padded_float, batch_first=True), 1),
    "time-major": (lambda: Attend(time_major), 1),
    "causal": (lambda: Attend(causal, batch_first=True), 1),
    "causal per head, padded": (lambda: Attend(causal_heads, batch_first=True), 1),
    "cross, kdim, vdim": (lambda: Attend(cross, batch_first=True, kdim=5, vdim=6), 1),
    "unbatched": (lambda: Attend(each_row), BATCH),
    "encoder, padded": (lambda: Encoder(padded=True), 2),
    "encoder, causal": (lambda: Encoder(causal=True, is_causal=True), 2),
    "encoder, detected, padded": (lambda: Encoder(causal=True, padded=True), 2),
    "checkpointed": (Checkpointed, 2),
    "decoder": (Decoder, 4),
}
"""What is run, with the number of its attention calls."""
UNPADDED = ("default", "causal", "unbatched", "encoder, causal")
CAUSAL = ("causal per head, padded", "encoder, detected, padded", "checkpointed", "decoder")


class Classifier(nn.Module):
    """A model under a head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = MODELS[name][0]()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Output `[B, S, E]`, and the mean loss over labeled tokens."""
        out = self.body(batch["inputs_embeds"], batch["attention_mask"] == 0)
        logits = self.head(out).flatten(0, 1)
        return out, F.cross_entropy(logits, batch["labels"].flatten())


def batch_of(name: str, length: int) -> Batch:
    """Rows padded differently where the model is told; on the left only where nothing is causal."""
    generator = torch.Generator().manual_seed(length)
    labels = torch.randint(CLASSES, (BATCH, length), generator=generator)
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if name not in UNPADDED:
        mask[0, length - 3 :] = 0
        mask[1, slice(length - 1, None) if name in CAUSAL else slice(2)] = 0
    labels[mask == 0] = -100
    labels[0, : length // 2] = -100
    shape = (BATCH, length, WIDTH)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"inputs_embeds": inputs, "attention_mask": mask, "labels": labels}


def evaluated(model: Classifier, batch: Batch) -> Tensor:
    """Output in eval mode, where torch has a fast path, without gradients."""
    model.eval()
    with torch.no_grad():
        return model.loss(batch)[0]


def run_models(rank: int, world: int, layout: str, length: int) -> bytes:
    """Number of calls, outputs put together, loss and gradients of every model."""
    assert torch.backends.mha.get_fastpath_enabled()
    found = {}
    with one_group(rank, world, layout=layout) as parallel:
        for name in MODELS:
            model = Classifier(name)
            shard = parallel.shard(batch_of(name, length), module=model, stage=name)
            with parallel.active(shard):
                out, loss = model.loss(shard.batch)
                calls = shard.context.log.attention, shard.context.log.causal
                loss.backward()
                silent = evaluated(model, shard.batch)
            parallel.check(shard, loss)
            outs = [parallel.unshard(x, shard) for x in (out, silent)]
            grads = {key: p.grad for key, p in model.named_parameters()}
            found[name] = (calls, outs, loss.item(), grads)
    return pickle.dumps(found)


@pytest.mark.parametrize(
    ("size", "layout"), rotated(((1, 9), (2, 13), (3, 17)), [("contiguous",), ("zigzag",)])
)
def test_modules(
    size: tuple[int, int], layout: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, length = size
    ranks = [pickle.loads(x) for x in pool.run(run_models, layout, length, world=world)]
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    for name, (_, expected_calls) in MODELS.items():
        model, whole = Classifier(name), batch_of(name, length)
        out, loss = model.loss(whole)
        loss.backward()
        silent = evaluated(model, whole)
        real = (whole["attention_mask"] != 0).unsqueeze(-1)
        for rank, found in enumerate(ranks):
            calls, outs, got, _ = found[name]
            assert calls[0] == expected_calls, f"rank {rank}: {name}: {calls} calls"
            assert got == pytest.approx(loss.item(), abs=1e-10), f"rank {rank}: {name}"
            for kind, one, other in zip(("train", "eval"), outs, (out, silent), strict=True):
                difference = ((one - other).masked_fill(~real, 0)).abs().max().item()
                assert difference < 1e-10, f"rank {rank}: {name}: {kind} is off by {difference}"
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            mean = sum(found[name][3][key] for found in ranks) / world
            difference = (mean - parameter.grad).abs().max().item()
            assert difference < 1e-10, f"{name}: gradient of {key} is off by {difference}"


def hide_another_key(rank: int, world: int) -> None:
    """One rank alone has a mask that is not the batch's padding."""
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=3)) for _ in range(2)]
    parallel = ContextParallel(groups[0], meta=groups[1], rank=rank, world=world)
    try:
        model = Classifier("padded")
        shard = parallel.shard(batch_of("padded", 13), module=model)
        if rank == world - 1:
            shard.batch["attention_mask"][0, 0] ^= 1
        with parallel.active(shard):
            model.loss(shard.batch)
    finally:
        parallel.close()


def test_a_mask_that_one_rank_has_differently_stops_all(pool: Pool) -> None:
    for failure in pool.failures(hide_another_key, world=2):
        assert "module 'body.attn' (MultiheadAttention" in failure.message
        assert "not the padding of this batch" in failure.message
