"""What the planted faults and the right models are built from: token-local layers and attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp import functional
from tests._harness.text import text

VOCABULARY, WIDTH, HEADS, TABLE, CLASSES, IGNORED = 256, 16, 2, 64, 3, -100
ROWS, LENGTH = 2, 24

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Planted:
    """One model, its batch, and what must be said about it.

    Attributes:
        name: id of the test.
        make: builds the model, the same in every process; its class is in this module.
        batch: the whole batch.
        module: qualified name of the module that does wrong, "" for the root.
        audited: the audit of the first forward sees it.
        words: a pattern that the audit's message must match.
        warned: the audit warns and does not refuse.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    module: str = ""
    audited: bool = False
    words: str = ""
    warned: bool = False


def pieces(length: int) -> Tensor:
    """Rows of the text, one token longer than `length`: int64 `[ROWS, length + 1]`."""
    starts = range(0, 97 * ROWS, 97)
    return torch.tensor([list(text()[start : start + length + 1]) for start in starts])


def tokens(length: int = LENGTH, *, shifted: bool = True) -> Batch:
    """Tokens and labels `[ROWS, length]`; a prompt of another length in every row is ignored.

    Args:
        length: positions of a row.
        shifted: labels are aligned with the logits; else they are the tokens.
    """
    rows = pieces(length)
    labels = rows[:, 1:].clone() if shifted else rows[:, :-1].clone()
    for row in range(ROWS):
        labels[row, : 3 + 4 * row] = IGNORED
    return {"input_ids": rows[:, :-1].clone(), "labels": labels}


unshifted = partial(tokens, shifted=False)


def classes(length: int = LENGTH) -> Batch:
    """Tokens `[ROWS, length]` and one label per row `[ROWS]`."""
    return {"input_ids": pieces(length)[:, :-1].clone(), "labels": torch.tensor([1, 0])}


def turned(x: Tensor) -> Tensor:
    """`[..., D]` with its halves exchanged, the first negated."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Attention(nn.Module):
    """Self-attention through torch's function.

    Args:
        causal: earlier tokens only.
        width: channels.
    """

    def __init__(self, causal: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        projected: Tensor = self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return projected

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, H, S, D]` to `[B, H, S, D]`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Block(nn.Module):
    """Attention and an MLP, both residual.

    Args:
        attention: what mixes tokens.
        width: channels.
    """

    def __init__(self, attention: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        x = x + self.attention(self.norm(x))
        mixed: Tensor = x + self.mlp(x)
        return mixed


class Transformer(nn.Module):
    """Embeddings and two blocks; positions from `functional.positions`.

    Args:
        kinds: class of the attention of every block.
        causal: of attention without a class of its own.
        mixer: builds a residual module before the blocks.
        width: channels.
    """

    def __init__(
        self,
        kinds: Sequence[Callable[[], nn.Module]] = (),
        *,
        causal: bool = True,
        mixer: Callable[[], nn.Module] | None = None,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(TABLE, width)
        self.mixer = mixer() if mixer is not None else None
        parts = [make() for make in kinds] or [Attention(causal, width) for _ in range(2)]
        self.blocks = nn.ModuleList(Block(part, width) for part in parts)

    def forward(self, batch: Batch) -> Tensor:
        """`[B, S]` tokens to `[B, S, C]`."""
        x = self.embed(batch)
        if self.mixer is not None:
            x = x + self.mixer(x)
        for block in self.blocks:
            x = block(x)
        return x

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings of tokens and of their positions in the whole sequence."""
        ids = batch["input_ids"]
        embedded: Tensor = self.wte(ids) + self.wpe(functional.positions(ids.shape[1]))
        return embedded


class Model(nn.Module):
    """A language model with the plain mean of `cross_entropy`.

    Args:
        transformer: builds what is under the head.
        width: channels.
    """

    def __init__(
        self, transformer: Callable[[], nn.Module] = Transformer, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.transformer, self.head = transformer(), nn.Linear(width, VOCABULARY)

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B, S, V]`."""
        logits: Tensor = self.head(self.transformer(batch))
        return logits

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Mean over valid labels."""
        logits = self(batch).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)


class Classifier(nn.Module):
    """A bidirectional encoder with one label per row.

    Args:
        head: builds what makes logits of the encoder's output.
    """

    def __init__(self, head: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.encoder, self.head = Transformer(causal=False), head(WIDTH, CLASSES)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Mean over rows."""
        return F.cross_entropy(self.logits(self.encoder(batch)), batch["labels"])

    def logits(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, K]`."""
        found: Tensor = self.head(x)
        return found


def seeded(make: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A model in double with the same parameters in every process; the generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return make(*args, **options).double()


def made(make: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """A builder that can be pickled."""
    return partial(seeded, make, *args, **options)
