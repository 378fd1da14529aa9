"""Losses over the whole group: one sum of values and weights, with its exact adjoint.

[Note: one gradient rule] The objective is the mean over all ranks of what a step returns. A loss
here is the same scalar on every rank, `sum over ranks / weight over ranks`, and the backward of the
all-reduce is an all-reduce. The plain mean of gradients over ranks is then the gradient of one
device that sees the whole sequence; nothing is scaled anywhere.

[Note: per token or replicated] Losses over elements (`mse_loss`) may be of tokens, or of rows whose
values are equal on all peers. A mean over the group is the same for equal values; a sum must then
stay local. Whether an element belongs to a token is seen from the shape. A replicated tensor may
have a matching shape by chance, but then not on the ranks whose share has another size: a call is
per token if its shape says so on every rank, and every rank calls the same collectives either way.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.reduce import sum_
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.functional.operators import NOWHERE
from lightning_cp.sequences import Sequence

NEAREST = 64
"""How many operators before a loss are kept from making NaN of a gradient of 0."""


def token_sums(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of token losses and sum of their weights over all tokens of the group.

    Inside a context each rank passes its own tokens, in the order of the batch, and every rank
    gets the same two numbers; dummy tokens do not count. Outside it is a plain sum.

    Args:
        losses: any shape, one element per token; 0 where ignored.
        weights: same shape, not differentiated; 0 where ignored.

    Returns:
        `[2]` in float (double for double): sum of losses, sum of weights.

    Raises:
        RefusedError: if there is one loss too few per row: the step shifted labels on the shard.
        PeerError: if another rank failed.
    """
    found: Tensor = torch.ops.lightning_cp.token_sums(losses, weights)[0]
    return found


def group_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """`sum(losses) / sum(weights)` over the group, 0 where no token counts; see `token_sums`."""
    value, weight = token_sums(losses, weights).unbind()
    return (value / torch.where(weight == 0, torch.ones_like(weight), weight)).to(losses.dtype)


def element_loss(losses: Tensor, weights: Tensor | None, *, reduction: str) -> Tensor:
    """A mean or sum of elementwise losses over all tokens of the group.

    Elements belong to tokens where the shape is `[B, S_local, ...]` or `[B * S_local, ...]` (also
    with other rows than the batch's, as long as dim 1 has this rank's share). Dummy tokens do not
    count. Other shapes are taken for rows that are equal on all peers, or for a selection of local
    tokens: a mean is over all elements of the group, a sum stays local.

    Args:
        losses: one loss per element.
        weights: by whose sum a mean divides, of the shape of `losses` and not differentiated; None
            counts elements.
        reduction: "mean", "sum", or "batchmean": the sum over the size of dim 0 of what one device
            would see.

    Returns:
        0-dim, in the dtype of `losses`, the same on every rank; 0 where nothing counts.

    Raises:
        RefusedError: if there is one token too few per row: the step shifted targets on the shard.
        PeerError: if another rank failed.
    """
    totals: Tensor = torch.ops.lightning_cp.element_sums(losses, weights, reduction)[0]
    value, divisor = totals.unbind()
    return (value / torch.where(divisor == 0, 1, divisor)).to(losses.dtype)


def token_mean(loss: Tensor, count: float) -> Tensor:
    """The mean over the tokens of the group, of means that each rank took over its own tokens.

    Args:
        loss: one element, `sum(losses) / count` of this rank's tokens; anything, NaN too, where
            count is 0.
        count: how many of this rank's tokens count, or the sum of their weights.

    Returns:
        `sum(count * loss) / sum(count)` over the ranks in the shape and dtype of `loss`, the same
        on every rank; 0 where no token counts. Outside a context `loss`, or 0 where count is 0.
        Where this rank's count is 0, the operators nearest to its loss pass on gradients of 0 as
        0, and not as the NaN of 0 / 0.

    Raises:
        PeerError: if another rank failed.
    """
    wide = _accumulated(loss.reshape(()))
    if count == 0:
        wide = torch.where(torch.ones_like(wide, dtype=torch.bool), 0, wide)
        _pass_zeros(loss)
    packed = torch.stack([wide * count, torch.full_like(wide, count)])
    value, weight = torch.ops.lightning_cp.group_sum(packed)[0].unbind()
    mean: Tensor = value / torch.where(weight == 0, 1, weight)
    return mean.to(loss.dtype).reshape(loss.shape)


def _pass_zeros(loss: Tensor) -> None:
    """Make the operators nearest to a loss answer gradients of 0 with 0.

    Operators written in Python are left alone: what other ranks send back comes out of those.
    """

    def zero_for_zero(into: Any, out_of: Any) -> Any:
        silent = torch.stack([(x == 0).all() for x in out_of if x is not None]).all()
        return tuple(None if x is None else torch.where(silent, 0, x) for x in into)

    waiting, seen = deque([loss.grad_fn]), set[Any]()
    while waiting and len(seen) < NEAREST:
        node: Any = waiting.popleft()
        written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        if node is None or node in seen or written_in_python or not node.next_functions:
            continue
        seen.add(node)
        node.register_hook(zero_for_zero)
        waiting.extend(following for following, _ in node.next_functions)


def _accumulated(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _sequences(context: Context | None, count: int) -> list[tuple[Sequence, int]]:
    """Sequences of which `count` may be the local tokens, with the local tokens of one row."""
    if context is None:
        return []
    shares = ((s, s.layout.size(context.rank)) for s in context.sequences.values())
    return [(s, share) for s, share in shares if count == s.batch * share]


def _kept(context: Context | None, losses: Tensor) -> Tensor:
    """True for real tokens, in the flat order of `losses`; one element where all are real."""
    for sequence, share in _sequences(context, losses.numel()):
        if context is not None and sequence.layout.length > sequence.length and share:
            return sequence.real(context.rank).to(losses.device).repeat(sequence.batch)
    return torch.ones(1, dtype=torch.bool, device=losses.device)


def _shifted(context: Context, *counts: int) -> str:
    """Which of the counts is one token too few per row, in words; empty where none is."""
    for sequence in context.sequences.values():
        share = sequence.layout.size(context.rank)
        count = sequence.batch * (share - 1)
        # Every rank decides alike; with two tokens one target per row may be a row's label.
        if min(sequence.layout.sizes) > 2 and count in counts:
            return (
                f"a loss over {count} targets = {sequence.batch} rows x ({share} local tokens - 1):"
                f" the step shifts labels inside, which loses targets where the sequence is cut; "
                f"shift labels in the dataset, before the batch is cut, or with "
                f"lightning_cp.functional.shift_labels, and pass labels aligned with the logits"
            )
    return ""


def forward_implementation(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What the operator runs; returns both sums and the handle of the context."""
    context = SLOT.current
    kept = _kept(context, losses)
    totals = torch.stack(
        [
            torch.where(kept, _accumulated(x.reshape(-1)), 0).sum()
            for x in (losses, weights.to(losses.dtype))
        ]
    )
    if context is None:
        return totals, torch.tensor(NOWHERE)
    shifted = _shifted(context, losses.numel())
    if shifted:
        raise RefusedError(shifted)
    context.log.record(("loss", str(losses.dtype)))
    context.log.loss += 1
    return sum_(totals, group=context.group), torch.tensor(context.own_handle())


def backward_implementation(grad: Tensor, losses: Tensor, handle: Tensor) -> Tensor:
    """What the backward operator runs; returns the gradient of the losses."""
    context = None if int(handle) < 0 else SLOT.bound(int(handle)).context
    factor = grad[:1].clone()
    if context is not None:
        SLOT.enter_backward(context)
        sum_(factor, group=context.group)
    kept = _kept(context, losses)
    grads = torch.where(kept, factor.to(losses.dtype), 0)
    return grads.expand(losses.numel()).reshape(losses.shape).clone()


_token_sums = torch.library.custom_op(
    "lightning_cp::token_sums", forward_implementation, mutates_args=()
)
_token_sums_backward = torch.library.custom_op(
    "lightning_cp::token_sums_backward", backward_implementation, mutates_args=()
)


@_token_sums.register_fake
def _(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    totals = losses.new_empty(2, dtype=_accumulated(losses.new_empty(0)).dtype)
    return totals, torch.empty((), dtype=torch.int64)


@_token_sums_backward.register_fake
def _(grad: Tensor, losses: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(losses, memory_format=torch.contiguous_format)


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor, *_: None
) -> tuple[Tensor, None]:
    losses, handle = ctx.saved_tensors  # type: ignore[attr-defined]
    return torch.ops.lightning_cp.token_sums_backward(grad, losses, handle), None


_token_sums.register_autograd(_differentiate, setup_context=_save)


def _token_dim(sequence: Sequence, share: int, shape: torch.Size) -> int | None:
    """Dimension of the tokens (0: rows and tokens together), None where there is none."""
    if shape[:2] == (sequence.batch, share):
        return 1
    if shape and shape[0] == sequence.batch * share:
        return 0
    return 1 if len(shape) > 1 and shape[1] == share else None


def _place(context: Context, shape: torch.Size) -> tuple[Tensor, int] | None:
    """Which elements belong to real tokens, broadcastable; and the dimension of the tokens."""
    for sequence in context.sequences.values():
        share = sequence.layout.size(context.rank)
        dim = _token_dim(sequence, share, shape)
        if dim is not None:
            real = sequence.real(context.rank)
            real = real if dim else real.repeat(sequence.batch)
            return real.view(*(1,) * dim, -1, *(1,) * (len(shape) - 1 - dim)), dim
    return None


def _totals(
    losses: Tensor, weights: Tensor | None, reduction: str, kept: Tensor | None = None
) -> list[Tensor]:
    """Sum and divisor of what is kept, in double."""

    def total(x: Tensor) -> Tensor:
        chosen = x if kept is None else torch.where(kept, x, 0)
        return chosen.sum(dtype=_accumulated(x.new_empty(0)).dtype).double()

    ones = torch.ones((1,) * losses.ndim, dtype=torch.bool, device=losses.device)
    counted = ones if kept is None else kept
    if reduction == "batchmean":
        divisor = counted.expand(losses.shape[:1] + counted.shape[1:]).sum().double()
    elif weights is None:
        divisor = counted.expand(losses.shape).sum().double()
    else:
        divisor = total(weights)
    return [total(losses), torch.ones_like(divisor) if reduction == "sum" else divisor]


def elements_implementation(
    losses: Tensor, weights: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator runs; returns sum and divisor, whether it was per token, and the handle."""
    context = SLOT.current
    own = _totals(losses, weights, reduction)
    dtype = _accumulated(losses.new_empty(0)).dtype
    if context is None:
        per_token = torch.zeros((), dtype=torch.bool, device=losses.device)
        return torch.stack(own).to(dtype), per_token, torch.tensor(NOWHERE)
    rows = losses.shape[:2].numel() if losses.ndim > 1 else 0
    shifted = _shifted(context, *losses.shape[:1], rows)
    context.log.record(("loss", reduction, str(losses.dtype)))
    context.log.loss += 1
    place = _place(context, losses.shape)
    kept = own
    if place is not None and not place[0].all():
        kept = _totals(losses, weights, reduction, place[0].to(losses.device))
    votes = [torch.full_like(own[0], vote) for vote in (place is not None, bool(shifted))]
    packed = torch.stack([*kept, *own, *votes])
    if context.world > 1:
        sum_(packed, group=context.group)
    per_token, all_shifted = packed[4:] == context.world
    if shifted and all_shifted:
        raise RefusedError(
            f"{shifted}; or wrap it in functional.local() if it is no loss over tokens"
        )
    grouped, others = packed[:2], packed[2:4]
    if reduction == "sum":
        grouped, others = torch.stack([packed[0], own[1]]), torch.stack(own)
    elif reduction == "batchmean" and place is not None and place[1] == 1:
        grouped = torch.stack([packed[0], own[1]])
    totals = torch.where(per_token, grouped, others).to(dtype)
    return totals, per_token, torch.tensor(context.own_handle())


def elements_backward_implementation(
    grad: Tensor,
    per_token: Tensor,
    handle: Tensor,
    reduction: str,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """What the backward operator runs; returns the gradient of the losses."""
    factor = grad[0].clone()
    if int(handle) != NOWHERE:
        context = SLOT.bound(int(handle)).context
        SLOT.enter_backward(context)
        if context.world > 1:
            sum_(factor, group=context.group)
        if reduction == "sum":
            factor = torch.where(per_token, factor, grad[0])
        place = _place(context, torch.Size(shape))
        if place is not None:
            factor = torch.where(place[0].to(grad.device) | ~per_token, factor, 0)
    return factor.to(dtype).expand(shape).contiguous()


_element_sums = torch.library.custom_op(
    "lightning_cp::element_sums", elements_implementation, mutates_args=()
)
_element_sums_backward = torch.library.custom_op(
    "lightning_cp::element_sums_backward", elements_backward_implementation, mutates_args=()
)


@_element_sums.register_fake
def _(losses: Tensor, weights: Tensor | None, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    totals = losses.new_empty(2, dtype=_accumulated(losses.new_empty(0)).dtype)
    return totals, losses.new_empty((), dtype=torch.bool), torch.empty((), dtype=torch.int64)


@_element_sums_backward.register_fake
def _(
    grad: Tensor,
    per_token: Tensor,
    handle: Tensor,
    reduction: str,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


def _save_elements(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    losses, _, ctx.reduction = inputs
    ctx.shape, ctx.dtype = list(losses.shape), losses.dtype
    ctx.save_for_backward(*output[1:])


def _differentiate_elements(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, None, None]:
    call = torch.ops.lightning_cp.element_sums_backward
    return call(grad, *ctx.saved_tensors, ctx.reduction, ctx.shape, ctx.dtype), None, None


_element_sums.register_autograd(_differentiate_elements, setup_context=_save_elements)
