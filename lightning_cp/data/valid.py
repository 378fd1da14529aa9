"""How many tokens of a shard count in a loss that a step computes by hand."""

import torch

from lightning_cp.data.containers import items
from lightning_cp.data.cut import Cut
from lightning_cp.errors import RefusedError

IGNORED = -100
"""The label of a token that no loss counts."""

COUNTING = ("loss_mask", "shift_labels", "labels", "attention_mask")
"""Fields that say which tokens count; the first that the batch has is taken."""


def valid_tokens(part: Cut, *, rank: int) -> float:
    """Tokens of one rank's part that count in a loss, or the sum of their weights.

    That is the sum of `loss_mask`, the most specific of the fields, if the batch has it; else the
    number of `shift_labels` or `labels` that are not -100; else the sum of `attention_mask`; else
    the number of tokens. Dummy tokens never count: the fields have 0 or -100 there.

    Args:
        part: what `cut` made for this rank.
        rank: rank within the context-parallel group.

    Raises:
        RefusedError: on every rank, if there are dummy tokens and no field that says so, or if it
            is not clear which of several sequences is meant.
    """
    known = next((k for k in COUNTING for x in part.fields.values() if x.called(k)), None)
    found = [(of, n) for of, x in part.fields.items() if known for n in x.called(known)[:1]]
    unsaid = len(part.sequences) > 1 and known in (None, "attention_mask")
    if unsaid or len(found) > 1:
        raise RefusedError(
            f"this batch has the sequences {', '.join(part.sequences)}, and not one alone has a "
            f"field that says which tokens count in a mean over local tokens; use "
            f"lightning_cp.functional.sequence_mean, or add a loss_mask to one of them"
        )
    sequence = part.sequences[found[0][0]] if found else part.sequence
    real = sequence.real(rank)
    if not found:
        dummies = sequence.layout.length - sequence.length
        if dummies:
            raise RefusedError(
                f"{dummies} dummy tokens per row fill this batch up, and none of the fields "
                f"{', '.join(COUNTING)} keeps them out of a mean over local tokens; add a "
                f"loss_mask of ones [B, S] to the batch and weigh the mean by it, or use "
                f"lightning_cp.functional.sequence_mean"
            )
        return float(sequence.batch * int(real.sum()))
    name = found[0][1]
    field = items(part.batch)[name].movedim(part.dims[name], -1)
    weights = field != IGNORED if name.endswith("labels") else field
    return float(torch.where(real.to(field.device), weights, 0).sum(dtype=torch.float64))
