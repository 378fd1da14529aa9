"""One named sequence of a batch: who holds which of its tokens, and what of it is real."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.errors import RefusedError
from lightning_cp.layout import Layout
from lightning_cp.mask import Documents, Mask
from lightning_cp.plan import Held, PlanKey, Schedule
from lightning_cp.spans import Span


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One named sequence of a batch: how it is laid out and what of it is real.

    Attributes:
        layout: who holds which positions; positions at or past `length` are dummies.
        length: number of real positions.
        batch: rows of the batch.
        documents: cumulative document lengths, common to all rows or for every row its own; None
            for one document.
        as_transformers: documents follow the rules of Hugging Face transformers: they hold for
            causal attention, and only if the model was called in a way that isolates them.
        keys: for every batch row the span of positions that are not padding, or None.
        whole: every rank holds all positions, and `layout` says so of the rank that asks.
    """

    layout: Layout
    length: int
    batch: int
    documents: Documents | None = None
    as_transformers: bool = False
    keys: tuple[Span, ...] | None = None
    whole: bool = False

    def visible_keys(self, rank: int) -> Tensor:
        """Which local positions of `rank` are not padding: bool `[batch, size(rank)]`."""
        positions = self.layout.positions(rank)
        keys = self.keys or ((0, self.length),) * self.batch
        start, stop = torch.tensor(keys).unbind(1)
        return (positions >= start[:, None]) & (positions < stop[:, None])

    def real(self, rank: int) -> Tensor:
        """Which local positions of `rank` are no dummies: bool `[size(rank)]`."""
        return self.layout.positions(rank) < self.length


def plan_key(
    q: Sequence, kv: Sequence, mask: Mask, *, rank: int, exchange: str | Schedule
) -> PlanKey:
    """What the plan of a call is found by.

    Nothing travels where every rank holds all keys. Each rank has a gradient of its own copies
    then, which the mean over ranks adds up, as it does for parameters.

    Raises:
        RefusedError: if queries that every rank holds attend to keys that are cut.
    """
    if q.whole and not kv.whole:
        raise RefusedError(
            f"{q.length} queries that every rank holds whole attend to a sequence of {kv.length} "
            f"tokens that is cut, so that every rank would compute all of them; gather the keys "
            f"and values with functional.gather_sequence and attend in functional.local(), or cut "
            f"the queries"
        )
    return PlanKey(q.layout, kv.layout, mask, rank, Held() if kv.whole else exchange)
