"""What the calls of the numerical tests ask for besides plain softmax attention.

Legend: B batch, H query heads, S queries, T keys, N distances.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.context import SLOT
from lightning_cp.mask import MaskMod


class Asked(NamedTuple):
    """Terms of scores, by the names that `attend` gives them."""

    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    mask_mod: MaskMod | None = None

    @property
    def learned(self) -> dict[str, Tensor]:
        """What has a gradient."""
        named = self._asdict()
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def learning(self, change: Callable[[Tensor], Tensor]) -> "Asked":
        """The same with what has a gradient changed."""
        sinks, slopes, bias = (
            None if x is None else change(x)
            for x in (self.sinks, self.alibi_slopes, self.relative_bias)
        )
        return Asked(self.softcap, sinks, slopes, bias, self.mask_mod)

    def biased(self, scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores `[B, H, S, T]` with all terms, and what is hidden; written out pair by pair."""
        batch, heads, q_size, k_size = scores.shape
        q, k = torch.arange(q_size)[:, None], torch.arange(k_size)[None, :]
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes[:, None, None] * (q - k).abs()
        if self.relative_bias is not None:
            middle = self.relative_bias.shape[1] // 2
            column = torch.maximum(
                torch.minimum(k - q, torch.tensor(middle)), torch.tensor(-middle)
            )
            scores = scores + self.relative_bias[:, column + middle]
        if self.mask_mod is not None:
            b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
            hidden = hidden | ~self.mask_mod(b, h, q, k)
        return scores, hidden

    def options(self) -> tuple[float, Tensor | None, Tensor | None, Tensor | None, str | None]:
        """What the operator gets."""
        name = None if self.mask_mod is None else SLOT.mask_mods.name(self.mask_mod)
        return self.softcap or 0.0, self.sinks, self.alibi_slopes, self.relative_bias, name


def every_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Hides keys by row, head and both positions; some queries see none."""
    return (q + 2 * k + h + b) % 3 != 0


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _sinks(heads: int) -> Tensor:
    """Of every size: next to one of them all keys vanish, another one vanishes."""
    return torch.tensor([0.3, 80.0, -80.0, float("-inf"), 2.0, -1.0], dtype=torch.float64)[:heads]


ASKED: Mapping[str, Callable[[int], Asked]] = {
    "plain": lambda h: Asked(),
    "softcap": lambda h: Asked(softcap=1.5),
    "sinks": lambda h: Asked(sinks=_sinks(h)),
    "alibi": lambda h: Asked(alibi_slopes=_numbers(h).abs() / 4),
    "bias": lambda h: Asked(relative_bias=_numbers(h, 7)),
    "mod": lambda h: Asked(mask_mod=every_third),
    "all": lambda h: Asked(2.5, _sinks(h), _numbers(h) / 9, _numbers(h, 1), every_third),
}
"""From the number of query heads to terms."""
