"""The attention operator that every swapped call becomes, and the public function `attend`.

[Note: plans are found at run time] The operator is opaque to the compiler and asks the slot for
its plan when it runs, so that one compiled graph serves every batch. A forward returns the handle
of its plan as a 0-dim tensor; the backward gets it back as a saved tensor.
"""

import torch
from torch import Tensor

from lightning_cp.comm.digest import Digest
from lightning_cp.comm.p2p import BlockingLink, GroupLink, Link
from lightning_cp.context import SLOT, CallLog, Context, Ran, Sequence
from lightning_cp.errors import RefusedError
from lightning_cp.exchange import executor
from lightning_cp.kernels import resolve
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.layout import contiguous
from lightning_cp.mask import Window, check_window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
) -> Tensor:
    """Exact softmax attention over the whole sequence, of which every rank holds a part.

    Inside an active context each rank passes the queries, keys and values of its own tokens and
    gets the output of its own tokens; all ranks of the context-parallel group call together.
    Documents, padding and the layout come from the context. Outside a context it is attention over
    the tensors as they are.

    Args:
        q: queries `[B, H, S_local, D]`; float64, float32, bfloat16 or float16.
        k: keys `[B, Hk, S_local, D]`, `H` a multiple of `Hk` (grouped-query attention).
        v: values `[B, Hk, S_local, Dv]`.
        is_causal: hide keys after the query, by global position.
        scale: factor on the scores, `1 / sqrt(D)` where None.
        window: `(left, right)`, how many tokens before and after its own position a query sees,
            by global position and within its document; None for no limit on a side or on both.

    Returns:
        Output `[B, H, S_local, Dv]` in the dtype of `q`; 0 where a query sees no key. Gradients
        flow to q, k and v; a second derivative is refused.

    Raises:
        BatchError: if the window is no pair of integers that are at least 0, or None.
        RefusedError: if shapes do not fit, a size is no declared sequence's, or no kernel can
            compute the call.
        PeerError: if another rank failed.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    before, after = (-1 if side is None else side for side in check_window(window) or (None, None))
    out: Tensor = torch.ops.lightning_cp.attention(q, k, v, is_causal, factor, before, after)[0]
    return out


def forward_implementation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    before: int = -1,
    after: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator runs; returns output, LSE and the handle of the plan.

    `before` and `after` are the window, -1 for no limit.
    """
    _check(q, k, v)
    context = SLOT.current or _alone(q, k)
    SLOT.count_plain_attention()
    kernel = resolve(context.kernel, q, v)
    window = None if before < 0 and after < 0 else (_limit(before), _limit(after))
    heads = (*q.shape[:2], *k.shape[:2], q.shape[3], v.shape[3])
    code = context.log.record(("attention", *heads, q.dtype, is_causal, scale, window))
    if context.compare_calls:
        _compare(context, code, q, k, is_causal, window)
    context.log.attention += 1
    context.log.causal += is_causal
    context.log.seen[is_causal, window] = None
    handle = context.handle(q.shape[0], q.shape[2], k.shape[2], is_causal, window)
    plan = SLOT.bound(handle).plan
    context.log.ran[_ran(handle, q, k, v, backward=False)] += 1
    assert plan is not None  # invariant: attention handles always carry a plan
    link = _link(context)
    out, lse = executor.run(executor.forward(plan, kernel, q, k, v, scale=scale, link=link))
    if context.attended is not None:
        context.attended()
    return out, lse, torch.tensor(handle)


def backward_implementation(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward operator runs; returns dq, dk and dv."""
    context, plan = SLOT.bound(int(handle))
    context.log.ran[_ran(int(handle), q, k, v, backward=True)] += 1
    assert plan is not None  # invariant: attention handles always carry a plan
    kernel, saved = resolve(context.kernel, q, v), Saved(q, out, lse, grad)
    link = _link(context)
    grads = executor.run(executor.backward(plan, kernel, saved, k, v, scale=scale, link=link))
    if context.attended is not None:
        context.attended()
    return grads


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.ndim == k.ndim == v.ndim == 4 and (
        q.shape[0] == k.shape[0] == v.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[1:3] == v.shape[1:3]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (q, k, v))
        raise RefusedError(
            f"attention takes q [B, H, S, D], k [B, Hk, S, D] and v [B, Hk, S, Dv] of one dtype "
            f"with H a multiple of Hk; got {shapes}"
        )


def _alone(q: Tensor, k: Tensor) -> Context:
    """A context of one rank for a call outside any context."""
    sizes = {"q": q.shape[2], "kv": k.shape[2]}
    return Context(
        rank=0,
        world=1,
        group=None,
        meta=None,
        sequences={
            name: Sequence(layout=contiguous(size, 1), length=size, batch=q.shape[0])
            for name, size in sizes.items()
        },
        exchange="ring",
        log=CallLog(),
    )


def _link(context: Context) -> Link:
    link: Link = context.link or GroupLink(context.group)
    return link if context.overlap else BlockingLink(link)


def _ran(handle: int, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Ran:
    heads = q.shape[1], k.shape[1], k.shape[3], v.shape[3]
    return Ran(handle, q.shape[0], *heads, k.element_size(), backward)


def _limit(side: int) -> int | None:
    return None if side < 0 else side


def _compare(
    context: Context, code: int, q: Tensor, k: Tensor, is_causal: bool, window: Window | None
) -> None:
    """Compare the call over the group before its first transfer."""
    call = f"attention call {context.log.attention}"
    details = (
        f"B={q.shape[0]} H={q.shape[1]} Hk={k.shape[1]} D={q.shape[3]} {q.dtype} "
        f"is_causal={is_causal} window={window}"
    )
    Digest({call: code}, {call: details}, context.meta).wait()


attention = torch.library.custom_op(
    "lightning_cp::attention", forward_implementation, mutates_args=()
)
attention_backward = torch.library.custom_op(
    "lightning_cp::attention_backward", backward_implementation, mutates_args=()
)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    before: int = -1,
    after: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        executor.token_major(q, v.shape[-1], q.dtype),
        q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype)),
        torch.empty((), dtype=torch.int64),
    )


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor, Tensor, bool, float, int, int],
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v, _, ctx.scale, *_ = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    dq, dk, dv = torch.ops.lightning_cp.attention_backward(grad, *saved, ctx.scale)  # type: ignore[attr-defined]
    return dq, dk, dv, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)
