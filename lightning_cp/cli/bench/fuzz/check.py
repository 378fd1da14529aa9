"""One random call: every rank in turn in this process, against plain maths in double.

Legend: B batch, H query heads, Hk key heads, S positions, D head size.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.cli.bench.fuzz.cases import DTYPES, Case
from lightning_cp.cli.bench.fuzz.terms import learned, plain_scores, scores_of, shown
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Kernel, Saved
from lightning_cp.kernels.scores import PerHead
from lightning_cp.kernels.terms import sink_gradient
from lightning_cp.layout import Layout, contiguous
from lightning_cp.mask import Mask
from lightning_cp.plan import Plan, Ring, build_plan

EXACT = 1e-11
"""Largest error in double; of what is learned that of one rank counts as well, up to `MOST`."""

MOST = 1e-9
"""What no error in double may be above, because one rank may be as wrong."""

FINDINGS = (AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a call: it is valid, so each is a finding and not the end of the search."""

RATIO = 2.0
"""Largest error in other dtypes, over that of the same call on one rank."""

UNITS = 4
"""What is allowed beside: units of rounding, because one rank may hit the truth by luck."""


LEARNED = ("dsinks", "dslopes", "dtable")
"""Gradients that add up over all rows."""

LEARNED_RATIO = 3.0
"""`RATIO` of these: they are few numbers, of which the errors of one rank may cancel by luck."""

NOTHING = torch.empty(0)
"""The gradient of what is not learned."""


class Results(NamedTuple):
    """Output `[B, H, S, D]`, gradients in the shapes of q, k and v, and of what is learned.

    What is not learned has an empty gradient.
    """

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor
    dslopes: Tensor
    dtable: Tensor


def check(case: Case) -> str | None:
    """What is wrong with the results of a case, or None.

    Returns:
        A sentence with the tensor, its error and the bound.
    """
    whole = _inputs(case)
    try:
        found = run(case, whole)
    except FINDINGS as error:
        return f"{type(error).__name__}: {error}"
    given = PerHead(*(None if x is None else x.double() for x in learned(case)))
    exact = plain(case, [x.double() for x in whole], given)
    alone = (
        run(replace(case, layouts=_alone(case), schedule=Ring()), whole)
        if case.dtype != "fp64" or case.terms.learned
        else exact
    )
    for name, got, truth, single in zip(Results._fields, found, exact, alone, strict=True):
        ratio = LEARNED_RATIO if name in LEARNED else RATIO
        bound = EXACT
        if case.dtype != "fp64":
            rows = whole[0].shape[0] * whole[0].shape[2] if name in LEARNED else 1
            if name == "dslopes":
                rows *= case.mask.kv_length**2
            bound = ratio * _error(single, truth) + UNITS * _rounding(got, truth, whole, rows)
        elif name in LEARNED:
            bound = min(bound + ratio * _error(single, truth), MOST)
        wrong = _error(got, truth)
        if not wrong <= bound:
            return f"the error of {name} is {wrong:.3g}, more than {bound:.3g}"
    return None


def _alone(case: Case) -> tuple[Layout, Layout]:
    """The layouts of one rank that holds everything."""
    q_layout, kv_layout = (contiguous(layout.length, 1) for layout in case.layouts)
    return q_layout, kv_layout


def _rounding(found: Tensor, exact: Tensor, whole: list[Tensor], rows: int) -> float:
    """What rounding explains: a unit of the largest result, and float units of the terms.

    The terms of a gradient are products of the largest elements of three tensors, and may cancel;
    of what is learned those of all `rows` do, of slopes times a distance each.
    """
    terms = math.sqrt(rows * whole[0].shape[-1]) * max(_largest(x) for x in whole) ** 3
    unit = torch.finfo(found.dtype).eps
    return unit * _largest(exact) + torch.finfo(torch.float32).eps * terms


def _backward(
    plan: Plan, call: executor.Call, saved: Saved, k: Tensor, v: Tensor, kept: list[Tensor]
) -> executor.Turns[tuple[Tensor, Tensor, Tensor]]:
    """What a rank does after its forward; it has no inputs but what was kept, if anything was."""
    q = saved.q
    if kept:
        q, k, v = executor.rowless(q, k, v)
    return executor.backward(plan, call, saved._replace(q=q), k, v, kept=kept)


def run(case: Case, whole: list[Tensor]) -> Results:
    """The call as the ranks of a group make it, one after the other, put together again."""
    q_layout, kv_layout = case.layouts
    given, boxes = learned(case), Mailboxes()
    kernels = [KERNELS[case.kernel].bound(scores_of(case, given)) for _ in range(case.world)]
    scale = case.dims[0] ** -0.5
    cut = [
        [layout.shard(x, rank=rank, dim=2) for x, layout in zip(whole, _layouts(case), strict=True)]
        for rank in range(case.world)
    ]
    plans = [
        build_plan(q_layout, kv_layout, case.mask, rank=rank, exchange=case.schedule)
        for rank in range(case.world)
    ]
    calls = [executor.Call(kernel, scale, boxes.link(rank)) for rank, kernel in enumerate(kernels)]
    kept: list[list[Tensor]] = [[] for _ in calls]
    outs = executor.together(
        [
            executor.forward(plan, call, q, k, v, kept=own if case.keeps else None)
            for plan, call, own, (q, k, v, _) in zip(plans, calls, kept, cut, strict=True)
        ]
    )
    saved = [
        Saved(q, out, lse, grad) for (q, _, _, grad), (out, lse) in zip(cut, outs, strict=True)
    ]
    grads = executor.together(
        [
            _backward(plan, call, rows, k, v, own)
            for plan, call, rows, (_, k, v, _), own in zip(
                plans, calls, saved, cut, kept, strict=True
            )
        ]
    )
    if not boxes.empty:
        raise AssertionError("a message was sent that nobody waited for")
    parts = zip(*((out, *three) for (out, _), three in zip(outs, grads, strict=True)), strict=True)
    layouts = (q_layout, q_layout, kv_layout, kv_layout)
    whole_rows = (
        layout.unshard(list(part), dim=2) for layout, part in zip(layouts, parts, strict=True)
    )
    return Results(*whole_rows, *_learned_gradients(kernels, saved, given))


def _learned_gradients(
    kernels: list[Kernel], saved: list[Saved], given: PerHead
) -> tuple[Tensor, ...]:
    """Gradients of what is learned, to which every rank adds its part."""
    found = [kernel.scores.grads for kernel in kernels]
    if given.sinks is not None:
        own = [sink_gradient(rows, given.sinks) for rows in saved]
        found = [x._replace(sinks=sinks) for x, sinks in zip(found, own, strict=True)]
    parts = zip(*found, strict=True)
    return tuple(NOTHING if x[0] is None else torch.stack(x).sum(0) for x in parts)


def plain(case: Case, whole: list[Tensor], given: PerHead) -> Results:
    """Softmax attention over all pairs, and its gradients by torch's own differentiation."""
    q, k, v = inputs = [x.detach().requires_grad_() for x in whole[:3]]
    for x in given:
        inputs += [] if x is None else [x.requires_grad_()]
    ratio = case.heads[0] // case.heads[1]
    seen = shown(case, visible(case))
    scores = q @ k.repeat_interleave(ratio, 1).mT * case.dims[0] ** -0.5
    # A row that sees nothing gets any finite scores, and then weight 0.
    scores = plain_scores(case, scores, given).masked_fill(~seen, -1e4)
    if given.sinks is not None:
        sinks = given.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : seen.shape[-1]] * seen
    out = weights @ v.repeat_interleave(ratio, 1)
    grads = list(torch.autograd.grad(out, inputs, whole[3]))
    more = iter(grads[3:])
    return Results(out.detach(), *grads[:3], *(NOTHING if x is None else next(more) for x in given))


def visible(case: Case) -> Tensor:
    """The definition of the mask, pair by pair: bool `[B, 1, S, S]`, dummies included."""
    q_size, kv_size = (layout.length for layout in case.layouts)
    i, j = torch.arange(q_size)[:, None], torch.arange(kv_size)[None, :]
    mask = case.mask
    seen = (i < mask.q_length) & (j < mask.kv_length)
    before, after = mask.window or (None, None)
    if before is not None:
        seen &= j >= i - before
    if after is not None:
        seen &= j <= i + after
    rows = [seen & _of_row(mask, row, i, j) for row in range(case.batch)]
    return torch.stack(rows).unsqueeze(1)


def _of_row(mask: Mask, row: int, i: Tensor, j: Tensor) -> Tensor:
    prefix = ((mask.prefix or (0,)) * (row + 1))[row]
    found = (j <= i) | ((i < prefix) & (j < prefix)) | (not mask.is_causal)
    if mask.chunk is not None:
        edges = torch.tensor(mask.edges(row))
        first = edges[torch.bucketize(j, edges, right=True).clamp(max=len(edges) - 1) - 1]
        first = first if not mask.keys else first.clamp(min=mask.keys[row][0])
        found &= (i - first).div(mask.chunk, rounding_mode="floor") == (j - first).div(
            mask.chunk, rounding_mode="floor"
        )
    if mask.documents is not None:
        edges = torch.tensor(mask.edges(row))
        found &= torch.bucketize(i, edges, right=True) == torch.bucketize(j, edges, right=True)
    if mask.keys:
        start, stop = mask.keys[row]
        found &= (start <= j) & (j < stop)
    return found


def _inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.number)
    (heads, kv_heads), (head_dim, value_dim) = case.heads, case.dims
    q_size, kv_size = (layout.length for layout in case.layouts)
    shapes = (
        (case.batch, heads, q_size, head_dim),
        (case.batch, kv_heads, kv_size, head_dim),
        (case.batch, kv_heads, kv_size, value_dim),
        (case.batch, heads, q_size, value_dim),
    )
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[case.dtype])
        for shape in shapes
    ]


def _layouts(case: Case) -> tuple[Layout, ...]:
    q_layout, kv_layout = case.layouts
    return q_layout, kv_layout, kv_layout, q_layout


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max()) if exact.numel() else 0.0


def _largest(exact: Tensor) -> float:
    return float(exact.abs().max()) if exact.numel() else 0.0
