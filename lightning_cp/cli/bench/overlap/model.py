"""The model that is run: blocks whose attention and linear layers both cost something."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, width]` to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        return found


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, *, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of the squares of the last block's channels, over this rank's tokens."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()
