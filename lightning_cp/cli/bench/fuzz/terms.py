"""What random calls do to their scores: numbers by head, and the same in plain maths.

Legend: H query heads, S positions.
"""

import torch
from torch import Tensor

from lightning_cp.cli.bench.fuzz.cases import DTYPES, LEARNED, MASK_MODS, Case
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.kernels.scores import PLAIN, PerHead, Scores


def learned(case: Case) -> PerHead:
    """What the call learns by head, in float, or in double for a call in double."""
    generator = torch.Generator().manual_seed(case.number + 1)
    heads, columns = case.heads[0], 2 * case.terms.reach + 1
    sizes = {"sinks": (heads,), "slopes": (heads,), "table": (heads, columns)}
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    drawn = {name: torch.randn(sizes[name], generator=generator).to(dtype) for name in LEARNED}
    return PerHead(**{name: drawn[name] for name in case.terms.learned})


def scores_of(case: Case, given: PerHead) -> Scores:
    """Of the call on one rank, with room for its part of the gradients."""
    terms = case.terms
    if not terms.names:
        return PLAIN
    return Scores(
        softcap=terms.softcap,
        per_head=given,
        mask_mod=None if terms.mask_mod is None else MASK_MODS[terms.mask_mod],
        grads=given._replace(sinks=None).zeros(state_dtype(DTYPES[case.dtype])),
    )


def shown(case: Case, seen: Tensor) -> Tensor:
    """The pairs of `seen` `[B, 1, S, S]` that the call's function does not hide."""
    if case.terms.mask_mod is None:
        return seen
    b, h, q, k = (
        torch.arange(size).view(*(-1 if d == dim else 1 for d in range(4)))
        for dim, size in enumerate((seen.shape[0], case.heads[0], *seen.shape[2:]))
    )
    found: Tensor = seen & MASK_MODS[case.terms.mask_mod](b, h, q, k)
    return found


def plain_scores(case: Case, scores: Tensor, given: PerHead) -> Tensor:
    """Scores `[B, H, S, S]` with all terms but sinks, from scaled products."""
    if case.terms.softcap is not None:
        scores = (scores / case.terms.softcap).tanh() * case.terms.softcap
    n, m = scores.shape[-2:]
    distance = torch.arange(m) - torch.arange(n)[:, None]
    if given.slopes is not None:
        scores = scores - given.slopes[:, None, None] * distance.abs()
    if given.table is not None:
        reach = case.terms.reach
        scores = scores + given.table[:, distance.clamp(-reach, reach) + reach]
    return scores
