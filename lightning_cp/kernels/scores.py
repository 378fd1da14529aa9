"""What a call does to its scores besides scaling them, and the gradients of what it learns there.

Legend: B batch, H query heads, N distances.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.mask import MaskMod
from lightning_cp.spans import Spans


class PerHead(NamedTuple):
    """Numbers of every query head, or gradients with respect to them; None where there are none.

    Attributes:
        sinks: scores `[H]` of a key that every query sees and whose value is 0.
        slopes: `[H]`, what a score loses with every position between query and key.
        table: `[H, N]`, what is added to a score by the distance from its query to its key, the
            middle one (of an odd number) for a distance of 0; larger distances count as the
            largest.
    """

    sinks: Tensor | None = None
    slopes: Tensor | None = None
    table: Tensor | None = None

    def of(self, heads: slice) -> "PerHead":
        """Views of the numbers of some heads."""
        return PerHead(*(None if x is None else x[heads] for x in self))

    def zeros(self, dtype: torch.dtype) -> "PerHead":
        """Room for the gradients."""
        return PerHead(*(None if x is None else torch.zeros_like(x, dtype=dtype) for x in self))


class Dropout(NamedTuple):
    """Weights are dropped with probability `p`; `seed` is that of the call on this rank."""

    p: float
    seed: int


NONE = PerHead()
"""Nothing that differs by head."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What happens to `scale * q @ k` of one call, in this order.

    Attributes:
        softcap: scores become `softcap * tanh(score / softcap)`.
        per_head: sinks, slopes and a table, added.
        mask_mod: hides more keys; see `lightning_cp.mask.MaskMod`.
        dropout: of the weights.
        grads: room for the gradients of `per_head`, to which a backward adds.
        first_head: what the first of these heads is called in `mask_mod`.
        queries: global positions of the rows of the queries, in order.
        keys: those of the buffer.
    """

    softcap: float | None = None
    per_head: PerHead = NONE
    mask_mod: MaskMod | None = None
    dropout: Dropout | None = None
    grads: PerHead = NONE
    first_head: int = 0
    queries: Spans = ()
    keys: Spans = ()

    @property
    def terms(self) -> frozenset[str]:
        """What a kernel has to compute; sinks are merged by whoever runs it."""
        given = {
            "softcap": self.softcap,
            "alibi_slopes": self.per_head.slopes,
            "relative_bias": self.per_head.table,
            "mask_mod": self.mask_mod,
            "dropout": self.dropout,
        }
        return frozenset(name for name, value in given.items() if value is not None)

    def of(self, heads: slice) -> "Scores":
        """The same for some of the query heads; gradients are views of those of all."""
        return replace(
            self,
            per_head=self.per_head.of(heads),
            grads=self.grads.of(heads),
            first_head=self.first_head + (heads.start or 0),
        )

    def at(self, queries: Spans, keys: Spans) -> "Scores":
        """The same for rows of these global positions."""
        return replace(self, queries=queries, keys=keys)


PLAIN = Scores()
"""Of a call that only scales."""
