"""The demo's model: an ordinary byte-level GPT of about a million parameters.

B rows, S tokens, H heads, D numbers per head. Nothing in here knows of context parallelism: the
model takes the positions of its tokens instead of counting them, and that is all it takes.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY = 256
WIDTH = 256
HIDDEN = 768
HEADS = 2
HEAD_DIM = 32
LAYERS = 2


class Rotary(nn.Module):
    """Turns pairs of numbers of a head by angles that depend on the token's position."""

    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, x_BHSD: Tensor, position_ids: Tensor) -> Tensor:
        """`x_BHSD` turned; `position_ids` is int64 `[B, S]`."""
        angles = (position_ids[..., None] * self.inverse)[:, None]
        first, second = x_BHSD.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward network, each on normalised input and added."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM, bias=False)
        self.rotary = Rotary()
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """`x` is `[B, S, WIDTH]`, and so is the result."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = self.rotary(q, position_ids), self.rotary(k, position_ids)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class DemoGPT(LightningModule):
    """The model and its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits `[B, S, VOCABULARY]` of tokens at given positions, both int64 `[B, S]`."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, position_ids)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss over the tokens."""
        logits = self(batch["input_ids"], batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW whose `eps` is large enough that rounding of small gradients stays small."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)
