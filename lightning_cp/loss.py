"""Token losses over the whole group: one sum of values and weights, with its exact adjoint.

[Note: one gradient rule] The objective is the mean over all ranks of what a step returns. A loss
here is the same scalar on every rank, `sum over ranks / weight over ranks`, and the backward of the
all-reduce is an all-reduce. The plain mean of gradients over ranks is then the gradient of one
device that sees the whole sequence; nothing is scaled anywhere.
"""

import torch
from torch import Tensor

from lightning_cp.comm.reduce import sum_
from lightning_cp.context import SLOT, Context, Sequence
from lightning_cp.errors import RefusedError


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


def _check_count(context: Context, count: int) -> None:
    for sequence in context.sequences.values():
        share = sequence.layout.size(context.rank)
        # Every rank decides alike; with two tokens one target per row may be a row's label.
        if min(sequence.layout.sizes) > 2 and count == sequence.batch * (share - 1):
            raise RefusedError(
                f"a loss over {count} targets = {sequence.batch} rows x ({share} local tokens - 1):"
                f" the step shifts labels inside, which loses targets where the sequence is cut; "
                f"shift labels in the dataset, before the batch is cut, and pass labels aligned "
                f"with the logits"
            )


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
        return totals, torch.tensor(-1)
    _check_count(context, losses.numel())
    context.log.record(("loss", str(losses.dtype)))
    context.log.loss += 1
    return sum_(totals, group=context.group), torch.tensor(SLOT.keep(context))


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
