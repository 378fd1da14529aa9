"""Models that are right on a shard and look as if they might not be: no finding, no warning."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import functional
from tests._harness.parts import (
    HEADS,
    IGNORED,
    LENGTH,
    ROWS,
    WIDTH,
    Attention,
    Batch,
    Model,
    Planted,
    Transformer,
    made,
    pieces,
    tokens,
    turned,
)


class Positioned(Transformer):
    """A transformer whose forward names `position_ids`, so that the batch gets them."""

    def forward(self, batch: Batch, position_ids: Tensor | None = None) -> Tensor:
        """`[B, S, C]`."""
        return super().forward(batch)

    def embed(self, batch: Batch) -> Tensor:
        """Positions of the batch, 0, 1, 2, ... where it has none."""
        ids = batch["input_ids"]
        places = batch.get("position_ids")
        if places is None:
            places = torch.arange(ids.shape[1]).expand(ids.shape)
        embedded: Tensor = self.wte(ids) + self.wpe(places)
        return embedded


class RotaryTurned(Attention):
    """Rotary embedding from positions, in halves and then in interleaved pairs."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of turned queries and keys."""
        places = functional.positions(q.shape[2]).to(q.dtype)
        size = q.shape[-1]
        frequencies = 100.0 ** (-torch.arange(0, size, 2, dtype=q.dtype) / size)
        angles = places[:, None] * frequencies
        wide = torch.cat([angles, angles], -1)
        q, k = (x * wide.cos() + turned(x) * wide.sin() for x in (q, k))
        pairs = torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous())
        k = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        even, odd = q[..., 0::2], q[..., 1::2]
        q = torch.stack(
            [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
        ).flatten(-2)
        return super().mix(q, k, v)


class Grouped(nn.Module):
    """Four query heads, two key heads; scales by head from an arange over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        slopes = 2.0 ** -torch.arange(1, 5, dtype=x.dtype)
        q = q * slopes[None, :, None, None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Indexed(nn.Module):
    """Index 0 and -1, unbind, split and one-hot on everything but the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        stacked = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in stacked.unbind(2))
        moved = stacked.permute(2, 0, 3, 1, 4)
        assert torch.equal(moved[0], q)
        assert torch.equal(moved[-1], v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = torch.arange(x.shape[0])
        first = out[:, 0] + out[:, -1] + x.split(x.shape[-1] // 2, -1)[0] * out[rows].sum(1)
        kinds = F.one_hot(first.argmax(-1) % HEADS, HEADS).to(x.dtype)
        gates: Tensor = self.gates(kinds) * x[0].mean(-1, keepdim=True)
        return out.transpose(1, 2).flatten(2) + gates + x[..., :1] + x[..., 1:].mean(-1)[..., None]


class Router(nn.Module):
    """The two likeliest of four experts for every token, in the padded form and the sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out = out.index_add(0, token, weights[token, slot, None] * expert(flat[token]))
        return out.view_as(x)


class Pointwise(nn.Conv1d):
    """A convolution of kernel size 1 over channels."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SquareNorms(nn.Module):
    """Statistics of every token over as many channels as a rank has tokens, and a square softmax.

    Args:
        width: channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(width), nn.RMSNorm(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        mean, spread = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        by_hand = (x - mean) * (spread + 1e-5).rsqrt() * self.scale
        largest = x.amax(-1, keepdim=True) + x.max(-1).values[..., None] + x.norm(dim=-1)[..., None]
        largest = largest + x.softmax(-1) * x.logsumexp(-1, keepdim=True)
        mixed: Tensor = self.norm(x) + self.rms(x) + by_hand + largest + x.sum((-1,), keepdim=True)
        return mixed


class Tied(Model):
    """The head is the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.transformer.wte.weight  # type: ignore[union-attr,assignment]


class Recomputed(Transformer):
    """Every block is computed again in the backward."""

    def forward(self, batch: Batch) -> Tensor:
        """`[B, S, C]`."""
        x = self.embed(batch)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number == 1)
        return x


class Summed(Model):
    """A sum, not a mean."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Sum over valid labels."""
        return F.cross_entropy(self(batch).mT, batch["labels"], reduction="sum") / 10


class Smoothed(Model):
    """Label smoothing and weights of classes, of labels that the step masks."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Weighted mean over labels that are no spaces."""
        labels = batch["labels"]
        kept = torch.where(labels == IGNORED, IGNORED, labels)
        kept = torch.where(kept == ord(" "), IGNORED, kept).masked_fill(labels < 0, IGNORED)
        weight = 1 + torch.arange(256, dtype=torch.float64) / 256
        logits = self(batch).transpose(1, 2)
        return F.cross_entropy(logits, kept, weight=weight, label_smoothing=0.1)


class Shown(Model):
    """Keeps statistics of its own tokens, as scalars, for a log."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The plain mean."""
        logits, valid = self(batch), batch["labels"] != IGNORED
        self.shown = {
            "norm": float(logits.detach().norm()),
            "spread": float(logits.detach().std()),
            "largest": float(logits.detach().abs().max()),
            "mean": float(logits.detach().mean()),
            "valid": int(valid.sum()),
            "any": bool(valid.any()),
            "accuracy": float((logits.argmax(-1) == batch["labels"])[valid].double().mean()),
        }
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Encoder(Model):
    """Torch's encoder layer with the padding of the batch."""

    def __init__(self) -> None:
        super().__init__(partial(Transformer, causal=False))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B, S, V]`."""
        x = self.layer(
            self.transformer.embed(batch),  # type: ignore[operator]
            src_key_padding_mask=batch["attention_mask"] == 0,
        )
        visible = batch["attention_mask"].bool()[:, None, None, :]
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=visible)
        logits: Tensor = self.head(x + mixed.transpose(1, 2).flatten(2))
        return logits


class Masked(Model):
    """Torch's encoder, told that its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B, S, V]`."""
        x = self.transformer.embed(batch)  # type: ignore[operator]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.encoder(x, mask=mask, is_causal=True))
        return logits


class Modulated(Transformer):
    """Scales and shifts made from one value per row, spread over the tokens."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        self.condition = nn.Linear(1, 2 * WIDTH)

    def embed(self, batch: Batch) -> Tensor:
        """`[B, S, C]`."""
        shift, scale = self.condition(batch["time"][:, None]).chunk(2, dim=1)
        embedded = super().embed(batch) * (1 + scale.unsqueeze(1))
        modulated: Tensor = embedded + shift.unsqueeze(1)
        return modulated


class Taught(Model):
    """A frozen teacher reads a text that every rank has whole, with all that is local to it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Transformer().requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B, S, V]`."""
        with functional.local(), torch.no_grad():
            hint = self.teacher({"input_ids": batch["hint"]})
            size = hint.shape[1]
            hint = hint * torch.arange(size)[:, None] + hint.cumsum(1)
            told = (hint.mean(1) + hint[:, 0] + hint[:, -1]) / 100
        logits: Tensor = self.head(self.transformer(batch) + told[:, None])
        return logits


def padded(length: int = LENGTH) -> Batch:
    """Tokens with padding at the end of the first row and at the start of the second."""
    batch = tokens(length)
    visible = torch.ones(ROWS, length, dtype=torch.int64)
    visible[0, length - 5 :], visible[1, :3] = 0, 0
    return {**batch, "attention_mask": visible, "labels": batch["labels"].where(visible == 1, -100)}


def timed(length: int = LENGTH) -> Batch:
    """Tokens and one number per row."""
    return {**tokens(length), "time": torch.tensor([0.3, -0.8], dtype=torch.float64)}


def hinted(length: int = LENGTH) -> Batch:
    """Tokens, and a text of 12 bytes per row that passes through."""
    return {**tokens(length), "hint": pieces(11)}


def _lm(**options: Any) -> Any:
    return made(Model, partial(Transformer, **options))


def _wide(width: int) -> Any:
    """As many channels as a rank has tokens."""
    mixer = partial(SquareNorms, width)
    return made(Model, partial(Transformer, mixer=mixer, width=width), width)


RIGHT = (
    Planted("plain", _lm(), tokens),
    Planted("odd-length", _lm(), partial(tokens, 23)),
    Planted("position-ids", made(Model, Positioned), tokens),
    Planted("rope", _lm(kinds=(RotaryTurned, RotaryTurned)), tokens),
    Planted("gqa", _lm(kinds=(Grouped, Attention)), tokens),
    Planted("indexed", _lm(kinds=(Indexed, Attention)), tokens),
    Planted("pointwise", _lm(mixer=partial(Pointwise, WIDTH, WIDTH, 1)), tokens),
    Planted("width-12", _wide(12), tokens),
    Planted("width-8", _wide(8), tokens),
    Planted("router", _lm(mixer=Router), tokens),
    Planted("tied", made(Tied), tokens),
    Planted("recomputed", made(Model, Recomputed), tokens),
    Planted("sum", made(Summed), tokens),
    Planted("smoothed", made(Smoothed), tokens),
    Planted("shown", made(Shown), tokens),
    Planted("encoder", made(Encoder), padded),
    Planted("torch-causal", made(Masked), tokens),
    Planted("modulated", made(Model, Modulated), timed),
    Planted("taught", made(Taught), hinted),
)
