"""Operators over the context-parallel group, opaque to the compiler, each with its exact adjoint.

[Note: adjoints] The objective is the mean over ranks of what a step returns. The adjoint of a sum
that every rank receives is the sum of what the ranks send back. The adjoint of a gather is the sum
of all gradients of the whole, of which a rank keeps its own part. The adjoint of taking a part is
the part's gradient among zeros, without any transfer: the copies of a replicated tensor are
different variables, and the mean over ranks that follows for parameters adds them up.

Every operator finds its context when it runs, does what one device would do where there is none,
and returns a handle of the context for its backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.gather import all_gather
from lightning_cp.comm.reduce import max_, sum_, sum_scattered
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.sequences import Sequence

NOWHERE = -1
"""Handle of a call outside any context."""


def positions(anchor: Tensor, size: int) -> Tensor:
    """Global positions of `size` local tokens, on the device of `anchor`; 0 for dummies."""
    context = SLOT.current
    if context is None:
        return torch.arange(size, device=anchor.device)
    sequence = context.held(size)
    found = sequence.layout.positions(context.rank)
    return found.masked_fill_(found >= sequence.length, 0).to(anchor.device)


def real(anchor: Tensor, size: int) -> Tensor:
    """Which of `size` local tokens are no dummies, bool, on the device of `anchor`."""
    context = SLOT.current
    if context is None:
        return torch.ones(size, dtype=torch.bool, device=anchor.device)
    return context.held(size).real(context.rank).to(anchor.device)


def group_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` added over the group."""
    context = _called("group_sum", x)
    return _summed(context, x.clone(memory_format=torch.contiguous_format)), _keep(context)


def group_sum_backward(grad: Tensor, handle: Tensor) -> Tensor:
    """The gradients of all ranks, added."""
    return _summed(_entered(handle), grad.clone(memory_format=torch.contiguous_format))


def sequence_sums(values: Tensor, weights: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums along `dim` over all tokens of the group, with size 1 at `dim`, in one transfer."""
    context = _called("sequence_sums", values, dim)
    dtype = accumulator(values.dtype)
    sums = [x.sum(dim, keepdim=True, dtype=dtype) for x in (values, weights)]
    total, weight = _summed_together(context, sums)
    return total, weight, _keep(context)


def sequence_sums_backward(
    grad: Tensor, of_weights: Tensor, handle: Tensor, dim: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of all ranks, added, for every token alike."""
    both = _summed_together(_entered(handle), [grad, of_weights])
    first, second = (x.to(dtype).expand(_sizes(x, dim, size)).contiguous() for x in both)
    return first, second


def sequence_max(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Largest element along `dim` over all tokens of the group, with size 1 at `dim`."""
    context = _called("sequence_max", x, dim)
    return _highest(context, _of_real(context, x, dim, lowest(x.dtype)), dim), _keep(context)


def sequence_max_backward(
    grad: Tensor, x: Tensor, highest: Tensor, handle: Tensor, dim: int
) -> Tensor:
    """The gradients of all ranks, divided evenly among the tokens that are the maximum."""
    context = _entered(handle)
    hits = _of_real(context, x == highest, dim, False)
    wide = _wide(grad)
    count = hits.sum(dim, keepdim=True, dtype=wide.dtype)
    grads, count = _summed(context, torch.stack([wide, count]))
    return torch.where(hits, (grads / count.clamp_(min=1)).to(grad.dtype), 0)


def gather_sequence(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The whole tensor in global order, without dummies."""
    context = _called("gather_sequence", x, dim)
    return _whole(context, x, dim), _keep(context)


def gather_sequence_backward(grad: Tensor, handle: Tensor, dim: int, size: int) -> Tensor:
    """This rank's part of the sum of all gradients of the whole; 0 for dummies."""
    context = _entered(handle)
    if context is None:
        return grad.clone(memory_format=torch.contiguous_format)
    layout = context.sequence_of(size).layout
    padded = _padded(grad, dim, layout.length, 0)
    parts = [layout.shard(padded, rank=rank, dim=dim).contiguous() for rank in range(layout.world)]
    return sum_scattered(parts, rank=context.rank, group=context.group)


def scatter_sequence(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens of a whole tensor; 0 for dummies."""
    context = SLOT.current
    if context is None:
        return x.clone(memory_format=torch.contiguous_format), _keep(None)
    layout = _sequence_of_whole(context, x.shape[dim]).layout
    part = layout.shard(_padded(x, dim, layout.length, 0), rank=context.rank, dim=dim)
    return part.contiguous(), _keep(context)


def scatter_sequence_backward(grad: Tensor, handle: Tensor, dim: int, size: int) -> Tensor:
    """The gradient of this rank's tokens among zeros."""
    context = _entered(handle)
    if context is None:
        return grad.clone(memory_format=torch.contiguous_format)
    sequence = _sequence_of_whole(context, size)
    whole = grad.new_zeros(_sizes(grad, dim, sequence.layout.length))
    places = sequence.layout.positions(context.rank).to(grad.device)
    return whole.index_copy_(dim, places, grad).narrow(dim, 0, size).contiguous()


def shift_labels(labels: Tensor, dim: int, ignore_index: int) -> Tensor:
    """The label of the next position for every local token."""
    context = _called("shift_labels", labels, dim)
    whole = _whole(context, labels, dim)
    size = whole.shape[dim]
    following = whole.narrow(dim, min(1, size), max(size - 1, 0))
    if context is None:
        return _padded(following, dim, size, ignore_index).contiguous()
    layout = context.sequence_of(labels.shape[dim]).layout
    shifted = _padded(following, dim, layout.length, ignore_index)
    return layout.shard(shifted, rank=context.rank, dim=dim).contiguous()


def cumsum(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Sum of all tokens up to and with each local token; 0 for dummies."""
    context = _called("cumsum", x, dim)
    return _running(context, x, dim, backwards=False), _keep(context)


def cumsum_backward(grad: Tensor, handle: Tensor, dim: int) -> Tensor:
    """Sum of the gradients of all tokens from each local token on; 0 for dummies."""
    return _running(_entered(handle), grad, dim, backwards=True)


def global_softmax(x: Tensor, dim: int, packed: bool) -> tuple[Tensor, Tensor]:
    """Softmax along the tokens of the group; 0 for dummies and where every score is -inf."""
    context = _called("global_softmax", x, dim)
    scores = _of_real(context, _wide(x), dim, -torch.inf)
    if context is not None and packed and context.world > 1:
        own = _top(scores, dim)
        pair = torch.stack([own, (scores - _finite(own)).exp().sum(dim, keepdim=True)])
        pairs = torch.stack(
            all_gather(pair, [2] * context.world, dim=0, rank=context.rank, group=context.group)
        )
        highest = pairs[:, 0].amax(0)
        total = (pairs[:, 1] * (pairs[:, 0] - _finite(highest)).exp()).sum(0)
        powers = (scores - _finite(highest)).exp_()
    else:
        powers = (scores - _finite(_highest(context, scores, dim))).exp_()
        total = _summed(context, powers.sum(dim, keepdim=True))
    return (powers / torch.where(total == 0, 1, total)).to(x.dtype), _keep(context)


def global_softmax_backward(grad: Tensor, out: Tensor, handle: Tensor, dim: int) -> Tensor:
    """`out * (grad - sum of out * grad over the group)`."""
    context = _entered(handle)
    share = _wide(out)
    weighed = torch.where(share == 0, 0, share * _wide(grad))
    total = _summed(context, weighed.sum(dim, keepdim=True))
    return (weighed - share * total).to(grad.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what numbers of a dtype are added up."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float | int:
    """What is below every number of a dtype."""
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _keep(context: Context | None) -> Tensor:
    return torch.tensor(NOWHERE if context is None else context.own_handle())


def _called(name: str, x: Tensor, dim: int | None = None) -> Context | None:
    """The context of a call that communicates, with a note of it for the comparison of peers."""
    context = SLOT.current
    if context is not None:
        if dim is not None:
            context.sequence_of(x.shape[dim])
        shape = [size for index, size in enumerate(x.shape) if index != dim]
        context.log.record((name, *shape, str(x.dtype)))
    return context


def _entered(handle: Tensor) -> Context | None:
    """The context of a forward, active for the rest of the backward pass."""
    if int(handle) == NOWHERE:
        return None
    context = SLOT.bound(int(handle)).context
    SLOT.enter_backward(context)
    return context


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _summed(context: Context | None, x: Tensor) -> Tensor:
    return x if context is None or context.world == 1 else sum_(x, group=context.group)


def _summed_together(context: Context | None, tensors: list[Tensor]) -> list[Tensor]:
    packed = _summed(context, torch.cat([x.flatten() for x in tensors]))
    parts = packed.split([x.numel() for x in tensors])
    return [part.view(x.shape).clone() for part, x in zip(parts, tensors, strict=True)]


def _sizes(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _of_real(context: Context | None, x: Tensor, dim: int, other: float) -> Tensor:
    """`x` where a token is no dummy, elsewhere `other`."""
    if context is None:
        return x
    sequence = context.sequence_of(x.shape[dim])
    if sequence.length == sequence.layout.length:
        return x
    kept = sequence.real(context.rank).to(x.device)
    return torch.where(kept.view(-1, *(1,) * (x.ndim - 1 - dim)), x, other)


def _top(x: Tensor, dim: int) -> Tensor:
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    return x.new_full(_sizes(x, dim, 1), lowest(x.dtype))


def _highest(context: Context | None, x: Tensor, dim: int) -> Tensor:
    """Largest element along `dim` over the group; NaN where any is."""
    top = _top(x, dim)
    if context is None or context.world == 1:
        return top
    wide = _wide(top)
    unknown = wide.isnan()
    both = torch.stack([wide.masked_fill(unknown, 0), unknown.to(wide.dtype)])
    highest, unknown = max_(both, group=context.group)
    if x.is_floating_point():
        highest = highest.masked_fill(unknown > 0, torch.nan)
    found: Tensor = highest.to(x.dtype)
    return found


def _finite(highest: Tensor) -> Tensor:
    return torch.where(highest == -torch.inf, 0, highest)


def _whole(context: Context | None, x: Tensor, dim: int) -> Tensor:
    if context is None:
        return x.clone(memory_format=torch.contiguous_format)
    sequence = context.sequence_of(x.shape[dim])
    layout = sequence.layout
    shards = all_gather(x, layout.sizes, dim=dim, rank=context.rank, group=context.group)
    return layout.unshard(shards, dim=dim).narrow(dim, 0, sequence.length).contiguous()


def _sequence_of_whole(context: Context, length: int) -> Sequence:
    found = [s for s in context.sequences.values() if s.length == length]
    if not found:
        lengths = {name: s.length for name, s in context.sequences.items()}
        raise RefusedError(
            f"{length} tokens are no declared sequence's length (lengths: {lengths}); "
            f"scatter_sequence takes the whole sequence without dummies, as gather_sequence gives "
            f"it; code that is meant to work on local tokens belongs in functional.local()"
        )
    if any(other != found[0] for other in found[1:]):
        raise RefusedError(
            f"{length} tokens are the length of several different sequences; give them different "
            f"lengths so that a call can be told apart"
        )
    return found[0]


def _padded(x: Tensor, dim: int, length: int, value: int) -> Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_full(_sizes(x, dim, missing), value)], dim)


def _running(context: Context | None, x: Tensor, dim: int, *, backwards: bool) -> Tensor:
    """Running sums in global order: within each span, and over the spans before it."""

    def running(part: Tensor) -> Tensor:
        return part.flip(dim).cumsum(dim).flip(dim) if backwards else part.cumsum(dim)

    wide = _wide(x if x.is_floating_point() else x.long())
    if context is None:
        return running(wide).to(x.dtype if x.is_floating_point() else wide.dtype)
    layout = context.sequence_of(x.shape[dim]).layout
    wide = _of_real(context, wide, dim, 0)
    starts = sorted(span[0] for spans in layout.spans for span in spans)
    own = layout.spans[context.rank]
    rows = [starts.index(start) for start, _ in own]
    parts = wide.split([stop - start for start, stop in own], dim) if own else ()
    totals = wide.new_zeros([len(starts), *wide.shape[:dim], *wide.shape[dim + 1 :]])
    for row, part in zip(rows, parts, strict=True):
        totals[row] = part.sum(dim)
    totals = _summed(context, totals)
    nothing = torch.zeros_like(totals[:1])
    if backwards:
        others = torch.cat([totals[1:].flip(0).cumsum(0).flip(0), nothing])
    else:
        others = torch.cat([nothing, totals[:-1].cumsum(0)])
    found = [
        running(part) + others[row].unsqueeze(dim) for row, part in zip(rows, parts, strict=True)
    ]
    whole = _of_real(context, torch.cat(found, dim) if found else wide.clone(), dim, 0)
    return whole.to(x.dtype) if x.is_floating_point() else whole


COMMUNICATING: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(group_sum, group_sum_backward),
        *(sequence_sums, sequence_sums_backward),
        *(sequence_max, sequence_max_backward),
        *(gather_sequence, gather_sequence_backward),
        *(cumsum, cumsum_backward),
        *(global_softmax, global_softmax_backward),
        shift_labels,
    )
}
"""What the operators of these names run, for trackers that look inside."""
