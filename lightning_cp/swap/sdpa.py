"""`scaled_dot_product_attention` under context parallelism."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention import attend
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap._torch import is_tracing, is_wrapper, original
from lightning_cp.swap.dropped import kept_dropout, tile_only
from lightning_cp.swap.guard import outside_only
from lightning_cp.swap.shared import is_shared, own_heads
from lightning_cp.swap.where import caller

TRACED = (
    "attention with a mask or with dropout in compiled code is that of one device only; under "
    "context parallelism compile calls without attn_mask (is_causal=True, and padding that the "
    "context knows from the batch's 'attention_mask'), those with dropout in a step and with "
    "attention_dropout='tile', or keep the call out of the graph with torch.compiler.disable"
)
NESTED = (
    "attention over nested tensors; pass padded tensors and the batch's 'attention_mask' [B, S]"
)
VMAPPED = "attention within vmap; call it without, attention takes any batch dimensions itself"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The override: attention over the whole sequence while a context is active.

    While a compiler traces, the operator is emitted whether a context is active or not, because
    the graph will run in both situations; without a context it computes plain attention. With a
    mask, or with dropout outside a context, the graph gets plain attention that refuses to run
    within one; what is traced with dropout in a context draws a seed for the operator.

    Raises:
        RefusedError: for a mask that is not the batch's padding, for dropout unless an option says
            what becomes of it, and for tensors that the operator does not take.
    """
    context = SLOT.current
    plain = attn_mask is None and dropout_p == 0
    traced = is_tracing(query, key, value) and not SLOT.suspended
    if context is None and not (plain and traced):
        SLOT.count_plain_attention()
        if traced:
            query = outside_only(query, TRACED)
        return original("scaled_dot_product_attention")(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if context is not None:
        if traced and (attn_mask is not None or (dropout_p and context.dropout != "tile")):
            raise RefusedError(f"{caller(context)}: {TRACED}")
        if is_shared(query, key, value):
            own, together = own_heads(query, key, value, where=caller(context))
            out = scaled_dot_product_attention(
                *own, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return together(out)
        _refuse_wrappers(context, query, key, value)
        refuse_masks(context, query, key, attn_mask)
        dropout_p = kept_dropout(context, dropout_p, tiled=True)
        query = tile_only(query) if traced and dropout_p else query
    if query.shape[:-3] != key.shape[:-3] and query.ndim > 3:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
    if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise RefusedError(
            f"{caller(context)}: {query.shape[-3]} query heads and {key.shape[-3]} key heads need "
            f"enable_gqa=True"
        )
    try:
        q, k, v = (_batched(x) for x in (query, key, value))
        out = attend(q, k, v, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    except RefusedError as error:
        raise RefusedError(f"{caller(context)}: {error}") from error
    return out.reshape(*query.shape[:-1], value.shape[-1]) if query.ndim != 4 else out


def only_outside(
    reason: str,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Makes, of torch's attention over tensors of another kind, one that a context refuses.

    Args:
        reason: what kind, and the way out.
    """

    def make(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            context = SLOT.current
            if context is not None:
                raise RefusedError(
                    f"{caller(context)}: {reason}, or wrap the call in functional.local() where it "
                    f"is meant for this rank's tokens alone"
                )
            return plain(*args, **kwargs)

        return attention

    return make


def _batched(x: Tensor) -> Tensor:
    """`[..., H, S, D]` as `[B, H, S, D]`."""
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def refuse_masks(context: Context, query: Tensor, key: Tensor, attn_mask: Tensor | None) -> None:
    """Refuse a mask that is not the batch's padding.

    Raises:
        RefusedError: where there is one.
    """
    if attn_mask is None:
        return
    if attn_mask.ndim < 2 or attn_mask.shape[-2] != 1:
        raise RefusedError(
            f"{caller(context)}: a dense attention mask of shape {tuple(attn_mask.shape)} covers "
            f"only this rank's {key.shape[-2]} keys; pass is_causal=True for a causal mask, and "
            f"the batch's 'attention_mask' [B, S] for padding, in place of attn_mask"
        )
    check_padding(context, attn_mask, size=key.shape[-2], ndim=query.ndim)


def _refuse_wrappers(context: Context, *tensors: Tensor) -> None:
    """Tensors that stand for others, such as DTensor, are not exchanged as what they mean."""
    for tensor in tensors:
        if is_wrapper(tensor):
            raise RefusedError(
                f"{caller(context)}: attention over a {type(tensor).__name__} is not supported "
                f"under context parallelism; pass plain tensors"
            )


def check_padding(context: Context, mask: Tensor, *, size: int, ndim: int) -> None:
    """Refuse a mask over keys alone that is not the padding that was found in the whole batch.

    Args:
        context: the active context.
        mask: True, or 0 in floating point, where a key of this rank is visible, False or -inf
            where it is not; of a shape that broadcasts to `[B, ..., 1, size]`. Dummy tokens may
            be either.
        size: number of keys of this rank.
        ndim: number of dimensions of that shape.

    Raises:
        RefusedError: where they differ.
    """
    sequence = context.held(size)
    with SLOT.suspend():
        visible = sequence.visible_keys(context.rank).to(mask.device)
        dummy = ~sequence.real(context.rank).to(mask.device)
    if mask.dtype == torch.bool:
        given, clear = mask, True
    else:
        given = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        clear = bool((given | hidden).all())
    expected = visible.view(visible.shape[0], *(1,) * (ndim - 2), size)
    if not clear or not bool(((given == expected) | dummy).all()):
        raise RefusedError(
            f"{caller(context)}: the mask over keys of shape {tuple(mask.shape)} is not the "
            f"padding of this batch; pass the padding as the batch's 'attention_mask' [B, S] (1 "
            f"for tokens, one unbroken run per row), from which every rank takes it"
        )
