"""Small models, each right on one device: some would be silently wrong on a shard, some are right.

Every model is a plain module with `training_step(batch, index) -> loss`, double, without dropout,
and initialised alike in every process. `FAULTS` says of each planted fault which module does it
and what an audit must say; `RIGHT` are models that nobody may complain about.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests._harness.parts import (
    IGNORED,
    LENGTH,
    WIDTH,
    Attention,
    Batch,
    Classifier,
    Model,
    Planted,
    Transformer,
    classes,
    made,
    tokens,
    turned,
    unshifted,
)
from tests._harness.right import RIGHT

__all__ = ["FAULTS", "RIGHT", "Planted"]


class LocalPositions(Transformer):
    """Positions counted from 0 on every rank."""

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings of tokens and of an arange."""
        ids = batch["input_ids"]
        embedded: Tensor = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return embedded


class FirstRows(Transformer):
    """The first rows of the table of positions on every rank."""

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings of tokens and the head of the table."""
        ids = batch["input_ids"]
        embedded: Tensor = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        return embedded


class Rotary(nn.Module):
    """Rotary embedding from a table that is cut to the length it sees."""

    def __init__(self, size: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, size // 2))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, H, S, D]` turned by the first `S` rows."""
        size = x.shape[2]
        return x * self.cos[:size] + turned(x) * self.sin[:size]  # type: ignore[index]


class RotaryAttention(Attention):
    """Turns queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary(WIDTH // 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of turned queries and keys."""
        return super().mix(self.rotary(q), self.rotary(k), v)


class Eager(Attention):
    """Causal attention written out, with a lower triangle of ones cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(64, 64).tril().bool())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, H, S, D]`."""
        size = q.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = ~self.bias[:size, :size]  # type: ignore[index]
        mixed: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return mixed


class Bidirectional(Attention):
    """Attention over all tokens, written out with matrix products."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, H, S, D]`."""
        weights = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        return torch.matmul(F.softmax(weights, dim=-1), v)


class CausalConv(nn.Conv1d):
    """A convolution over the tokens before."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        before = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return super().forward(before).transpose(1, 2)


class TokenNorm(nn.BatchNorm1d):
    """Batch norm: statistics over all tokens of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.GRU):
    """A recurrence over the tokens, its output alone."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """`[B, S, C]` to `[B, S, C]`."""
        found: Tensor = super().forward(x)[0]
        return found


class Running(nn.Module):
    """A running sum of features."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        return x.cumsum(1) / LENGTH


class MeanPool(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, C]`."""
        return x.mean(1)


class FirstToken(nn.Linear):
    """A head that reads the first token."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, K]`."""
        return super().forward(x[:, 0])


class ShiftInside(Model):
    """Shifts labels in the step."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Mean over the targets after the first token."""
        logits, labels = self(batch)[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class OwnMean(Model):
    """Divides by the number of the labels it sees."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Mean over the valid labels, by hand."""
        labels = batch["labels"]
        losses = F.cross_entropy(self(batch).mT, labels, reduction="none")
        mask = (labels != IGNORED).to(losses.dtype)
        return (losses * mask).sum() / mask.sum()


class OwnReduce(Model):
    """Adds sum and count over all ranks, although the sum is that of the group already."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Sum over valid labels by their number, both over the ranks of the job."""
        labels = batch["labels"]
        total = F.cross_entropy(self(batch).mT, labels, reduction="sum")
        count = (labels != IGNORED).sum()
        if not dist.is_initialized():
            return total / count
        whole = total.detach().clone()
        dist.all_reduce(whole)
        dist.all_reduce(count)
        return (total * (whole / total.detach())) / count


class MeanClassifier(Classifier):
    """Classifies rows by the mean of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = MeanPool()

    def logits(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, K]`."""
        found: Tensor = self.head(self.pooler(x))
        return found


class LastClassifier(Classifier):
    """Classifies rows by their last token, in the step itself."""

    def logits(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, K]`."""
        found: Tensor = self.head(x[:, -1])
        return found


def lm(transformer: Callable[..., Transformer], root: type[Model] = Model) -> Any:
    """Builder of a language model around a transformer."""
    return made(root, transformer)


def with_attention(*kinds: type[Attention]) -> partial[Transformer]:
    """A transformer whose blocks attend in these ways."""
    return partial(Transformer, kinds)


def with_mixer(mixer: Callable[[], nn.Module]) -> partial[Transformer]:
    """A transformer with a module `mixer` before its blocks."""
    return partial(Transformer, mixer=mixer)


CONV = partial(CausalConv, WIDTH, WIDTH, 3)
GRU = partial(Recurrent, WIDTH, WIDTH, batch_first=True)
NORM = partial(TokenNorm, WIDTH)
ENCODER = partial(Transformer, causal=False)
FIRST = partial(Classifier, FirstToken)
UNSWAPPED = with_attention(Attention, Bidirectional)
EAGER = "transformer.blocks.1.attention"

FAULTS = (
    Planted("arange", lm(LocalPositions), tokens, "transformer", True, "arange"),
    Planted("table", lm(FirstRows), tokens, "transformer", True, "table"),
    Planted(
        "rotary",
        lm(with_attention(RotaryAttention, RotaryAttention)),
        tokens,
        "transformer.blocks.0.attention.rotary",
        True,
        "table",
    ),
    Planted("shift", lm(Transformer, ShiftInside), unshifted, "", True, "shift"),
    Planted("own-mean", lm(Transformer, OwnMean), tokens, ""),
    Planted("mean-pool", made(MeanClassifier), classes, "pooler", True, "mean"),
    Planted("last-token", made(LastClassifier), classes, "", True, "last"),
    Planted("first-token", made(FIRST), classes, "head", True, "first"),
    Planted("conv", lm(with_mixer(CONV)), tokens, "transformer.mixer", True, "convolution"),
    Planted("gru", lm(with_mixer(GRU)), tokens, "transformer.mixer", True, "recurren"),
    Planted("batch-norm", lm(with_mixer(NORM)), tokens, "transformer.mixer", True, "statistics"),
    Planted("cumsum", lm(with_mixer(Running)), tokens, "transformer.mixer", True, "cumsum"),
    Planted("eager", lm(with_attention(Attention, Eager)), tokens, EAGER, True, "table|softmax"),
    Planted(
        "unswapped", lm(with_attention(Attention, Bidirectional)), tokens, EAGER, True, "softmax"
    ),
    Planted("own-reduce", lm(Transformer, OwnReduce), tokens, "", True, "all_reduce", warned=True),
)
