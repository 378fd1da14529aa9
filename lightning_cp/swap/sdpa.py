"""`scaled_dot_product_attention` under context parallelism."""

import torch
from torch import Tensor

from lightning_cp.attention import attend
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap._torch import is_tracing, original
from lightning_cp.swap.where import caller


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
    the graph will run in both situations; without a context it computes plain attention.

    Raises:
        RefusedError: for a mask that is not the batch's padding, for dropout, and for shapes that
            the operator does not take.
    """
    context = SLOT.current
    plain = attn_mask is None and dropout_p == 0
    traced = is_tracing(query, key, value) and not SLOT.suspended
    if context is None and not (plain and traced):
        return original("scaled_dot_product_attention")(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if context is not None:
        _refuse(context, query, key, attn_mask, dropout_p)
    if query.shape[:-3] != key.shape[:-3] and query.ndim > 3:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
    if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise RefusedError(
            f"{caller(context)}: {query.shape[-3]} query heads and {key.shape[-3]} key heads need "
            f"enable_gqa=True"
        )
    try:
        out = attend(*(_batched(x) for x in (query, key, value)), is_causal=is_causal, scale=scale)
    except RefusedError as error:
        raise RefusedError(f"{caller(context)}: {error}") from error
    return out.reshape(*query.shape[:-1], value.shape[-1]) if query.ndim != 4 else out


def _batched(x: Tensor) -> Tensor:
    """`[..., H, S, D]` as `[B, H, S, D]`."""
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def _refuse(
    context: Context, query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> None:
    if dropout_p > 0:
        raise RefusedError(
            f"{caller(context)}: attention dropout of {dropout_p} in training is not supported "
            f"under context parallelism (a rank would repeat or skip random numbers); set the "
            f"attention dropout to 0, other dropout may stay"
        )
    if attn_mask is None:
        return
    if attn_mask.ndim < 2 or attn_mask.shape[-2] != 1:
        raise RefusedError(
            f"{caller(context)}: a dense attention mask of shape {tuple(attn_mask.shape)} covers "
            f"only this rank's {key.shape[-2]} keys; pass is_causal=True for a causal mask, and "
            f"the batch's 'attention_mask' [B, S] for padding, in place of attn_mask"
        )
    _check_padding(context, query, key, attn_mask)


def _check_padding(context: Context, query: Tensor, key: Tensor, attn_mask: Tensor) -> None:
    """A mask over keys alone must be the padding that was found in the whole batch."""
    sequence = context.sequence_of(key.shape[-2])
    with SLOT.suspend():
        visible = sequence.visible_keys(context.rank).to(attn_mask.device)
    if attn_mask.dtype == torch.bool:
        given, clear = attn_mask, True
    else:
        given = attn_mask == 0
        hidden = attn_mask <= torch.finfo(attn_mask.dtype).min / 2
        clear = bool((given | hidden).all())
    expected = visible.view(visible.shape[0], *(1,) * (query.ndim - 2), visible.shape[1])
    if not clear or not bool((given == expected).all()):
        raise RefusedError(
            f"{caller(context)}: the mask over keys of shape {tuple(attn_mask.shape)} is not the "
            f"padding of this batch; pass the padding as the batch's 'attention_mask' [B, S] (1 "
            f"for tokens, one unbroken run per row), from which every rank takes it"
        )
