"""The attention operator that every swapped call becomes, and the public function `attend`.

[Note: plans are found at run time] The operator is opaque to the compiler and asks the slot for
its plan when it runs, so that one compiled graph serves every batch. A forward returns the handle
of its plan as a 0-dim tensor; the backward gets it back as a saved tensor.

[Note: what is kept] Where ranks swap heads for tokens, what arrived is saved for the backward in
place of q, k and v: as many bytes over all ranks, and they travel once. Its size is a matter of the
plan, so compiled code, whose graph has sizes, saves q, k and v. So does a selective checkpoint,
which would hold it beside the inputs of the layer that it recomputes. What a backward sends depends
on it, and a compiler may give up a frame on some ranks alone; so from the micro-step on that
follows one in which a call was traced, nothing is kept.
"""

from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.digest import Digest
from lightning_cp.comm.p2p import BlockingLink, GroupLink, Link
from lightning_cp.compat import in_selective_checkpoint
from lightning_cp.context import SLOT, CallLog, Context, Ran, Served
from lightning_cp.errors import RefusedError
from lightning_cp.exchange import executor
from lightning_cp.exchange.switching import room
from lightning_cp.kernels import KERNELS, Choice, choose, resolve
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import state_dtype
from lightning_cp.kernels.operands import check_tensors, check_terms
from lightning_cp.kernels.scores import PLAIN, Dropout, PerHead, Scores
from lightning_cp.kernels.terms import sink_gradient
from lightning_cp.layout import contiguous
from lightning_cp.mask import MaskMod, Visibility, Window
from lightning_cp.plan import schedule_of
from lightning_cp.sequences import Sequence


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    chunk: int | None = None,
    prefix: int | tuple[int, ...] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    mask_mod: MaskMod | str | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Exact softmax attention over the whole sequence, of which every rank holds a part.

    Inside an active context each rank passes the queries, keys and values of its own tokens and
    gets the output of its own tokens; all ranks of the context-parallel group call together.
    Documents, padding and the layout come from the context. Outside a context it is attention over
    the tensors as they are. Scores are scaled, capped, and then biased; positions are global.

    Args:
        q: queries `[B, H, S_local, D]`; float64, float32, bfloat16 or float16.
        k: keys `[B, Hk, S_local, D]`, `H` a multiple of `Hk` (grouped-query attention).
        v: values `[B, Hk, S_local, Dv]`.
        is_causal: hide keys after the query.
        scale: factor on the scores, `1 / sqrt(D)` where None.
        window: `(left, right)`, how many tokens before and after its own position a query sees,
            within its document; None for no limit on a side or on both.
        chunk: size of chunks that do not see each other, from the start of a document on.
        prefix: how many positions at the start of each row, or of all, see each other anyway.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `[H]`, scores of a key that every query sees, with a value of 0.
        alibi_slopes: `[H]`, what a score loses with every position between query and key.
        relative_bias: `[H, N]`, added by the distance from query to key; see `PerHead.table`.
        mask_mod: `mask_mod(b, h, q, k)` hides keys, see `lightning_cp.mask.MaskMod`; or its name,
            see `functional.register_mask_mod`. What it closes over must be alike on all ranks.
        dropout_p: probability with which a weight is dropped; the others grow by `1 / (1 - p)`.

    Returns:
        Output `[B, H, S_local, Dv]` in the dtype of `q`; 0 where a query sees no key. Gradients
        flow to q, k, v, sinks, slopes and bias; a second derivative is refused.

    Raises:
        BatchError: if window, chunk or prefix is none; see `lightning_cp.mask.Visibility`.
        RefusedError: if shapes or numbers do not fit, a size is no declared sequence's, or no
            kernel can compute the call.
        PeerError: if another rank failed.
    """
    sees = Visibility(is_causal, window, chunk, (prefix,) if isinstance(prefix, int) else prefix)
    mod = mask_mod if isinstance(mask_mod, str | None) else SLOT.mask_mods.name(mask_mod)
    terms = softcap or 0.0, sinks, alibi_slopes, relative_bias, mod, dropout_p, draw_seed(dropout_p)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.lightning_cp.attention(
        q, k, v, is_causal, factor, *_limits(sees), *terms, keeping(q, k, v, *terms[1:4])
    )[0]
    return out


def keeping(*inputs: Tensor | None) -> bool:
    """Whether the operator is asked to keep what a backward needs; see [Note: what is kept]."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_selective_checkpoint():
        return False
    return any(x is not None and x.requires_grad for x in inputs)


def forward_implementation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    before: int = -1,
    after: int = -1,
    chunk: int = 0,
    prefix: Several[int] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    table: Tensor | None = None,
    mask_mod: str | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What the operator runs; returns output, LSE, the handle of the plan, and what is kept.

    `before` and `after` are the window, -1 for no limit; a `chunk` or `softcap` of 0 is none. With
    `keep` see [Note: what is kept].
    """
    learned = PerHead(sinks, slopes, table)
    check_tensors(q, k, v)
    check_terms(q, learned, softcap, dropout_p)
    context = SLOT.current or _alone(q, k)
    SLOT.count_plain_attention()
    scores = _scores(context, q, learned, softcap, mask_mod, dropout_p, seed)
    choice = choose(context.kernel, q, v, scores)
    kernel = KERNELS[choice.name].bound(scores)
    window = None if before < 0 and after < 0 else (_limit(before), _limit(after))
    sees = Visibility(is_causal, window, chunk or None, None if prefix is None else tuple(prefix))
    heads = (*q.shape[:2], *k.shape[:2], q.shape[3], v.shape[3])
    told = None if mask_mod is None else SLOT.mask_mods.told(mask_mod)
    keep = keep and context.keeps and schedule_of(context.exchange).block(context.world) > 1
    terms = (softcap, *(None if x is None else x.shape[1:] for x in learned), told, dropout_p, keep)
    code = context.log.record(("attention", *heads, q.dtype, scale, sees, terms))
    if context.compare_calls:
        _compare(context, code, q, k, sees, terms)
    context.log.kernels[_served(choice, q, v, scores)] = None
    context.log.attention += 1
    context.log.causal += is_causal
    handle = context.handle(q.shape[0], q.shape[2], k.shape[2], sees)
    plan = SLOT.bound(handle).plan
    assert plan is not None  # invariant: attention handles always carry a plan
    reason = plan.rejects(q.shape[1], dropout=dropout_p > 0)
    if reason is not None:
        raise RefusedError(f"exchange={plan.exchange!r}: {reason}")
    context.log.ran[_ran(handle, q, k, v, backward=False)] += 1
    call = executor.Call(kernel, scale, _link(context))
    kept: list[Tensor] = []
    turns = executor.forward(plan, call, q, k, v, kept=kept if keep else None)
    out, lse = executor.run(turns)
    if context.attended is not None:
        context.attended()
    return out, lse, torch.tensor(handle), kept


def backward_implementation(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    held: list[Tensor],
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    table: Tensor | None = None,
    mask_mod: str | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    sizes: Several[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the backward operator runs.

    `held` are the handle of the plan and what was kept. Where something was, q, k and v have no
    rows; `sizes` are the local queries and keys, for compilers.

    Returns:
        dq, dk and dv; then the gradients of sinks, slopes and table, empty where there are none.
    """
    handle, kept = int(held[0]), held[1:]
    context, plan = SLOT.bound(handle)
    ran = _ran(handle, q, k, v, backward=True)
    context.log.ran[ran._replace(kept=bool(kept))] += 1
    assert plan is not None  # invariant: attention handles always carry a plan
    learned = PerHead(sinks, slopes, table)
    scores = _scores(context, q, learned, softcap, mask_mod, dropout_p, seed)
    kernel, saved = resolve(context.kernel, q, v, scores), Saved(q, out, lse, grad)
    call = executor.Call(kernel, scale, _link(context))
    dq, dk, dv = executor.run(executor.backward(plan, call, saved, k, v, kept=kept))
    if context.attended is not None:
        context.attended()
    grads = scores.grads._replace(sinks=None if sinks is None else sink_gradient(saved, sinks))
    dsinks, dslopes, dtable = (
        q.new_empty(0) if x is None or found is None else found.to(x.dtype)
        for x, found in zip(learned, grads, strict=True)
    )
    return dq, dk, dv, dsinks, dslopes, dtable


def _limits(sees: Visibility) -> tuple[int, int, int, tuple[int, ...] | None]:
    """A visibility in numbers, see `forward_implementation`."""
    before, after = (-1 if side is None else side for side in sees.window or (None, None))
    return before, after, sees.chunk or 0, sees.prefix


def draw_seed(dropout_p: float, *, bits: int = 62) -> Tensor | None:
    """A number from the default generator of the CPU, which is alike on peers; None without use.

    What is recomputed draws it again, because checkpoints put that generator back.
    """
    if not dropout_p:
        return None
    seed: Tensor = torch.ops.aten.randint.low(0, 2**bits, [], dtype=torch.int64, device="cpu")
    return seed


def _scores(
    context: Context,
    q: Tensor,
    learned: PerHead,
    softcap: float,
    mask_mod: str | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Scores:
    """What the call does to its scores; the same object for all calls that do nothing."""
    if softcap == 0 and not any(x is not None for x in learned) and not (mask_mod or dropout_p):
        return PLAIN
    number = 0 if seed is None else int(seed)
    dropout = Dropout(dropout_p, number * context.world + context.rank) if dropout_p else None
    return Scores(
        softcap=softcap or None,
        per_head=learned,
        mask_mod=None if mask_mod is None else SLOT.mask_mods.find(mask_mod),
        dropout=dropout,
        grads=learned._replace(sinks=None).zeros(state_dtype(q.dtype)),
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
    link: Link = context.link or GroupLink(context.group, context.a2a)
    return link if context.overlap else BlockingLink(link)


def _ran(handle: int, q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Ran:
    heads = q.shape[1], k.shape[1], k.shape[3], v.shape[3]
    return Ran(handle, q.shape[0], *heads, k.element_size(), backward)


def _served(choice: Choice, q: Tensor, v: Tensor, scores: Scores) -> Served:
    return Served(*choice, tuple(sorted(scores.terms)), (q.shape[3], v.shape[3]), q.dtype)


def _limit(side: int) -> int | None:
    return None if side < 0 else side


def _compare(
    context: Context, code: int, q: Tensor, k: Tensor, sees: Visibility, terms: tuple[Any, ...]
) -> None:
    """Compare the call over the group before its first transfer."""
    call = f"attention call {context.log.attention}"
    details = (
        f"B={q.shape[0]} H={q.shape[1]} Hk={k.shape[1]} D={q.shape[3]} {q.dtype} "
        f"is_causal={sees.is_causal} window={sees.window} chunk={sees.chunk} prefix={sees.prefix} "
        f"softcap, sinks, slopes, table, mask_mod, dropout_p, keeps heads={terms}"
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
    q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if SLOT.active is not None:
        SLOT.active.log.traced = True
    return (
        executor.token_major(q, v.shape[-1], q.dtype),
        q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype)),
        torch.empty((), dtype=torch.int64),
        [],
    )


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, ...]:
    learned = (*options[5:8], None, None, None)[:3]  # defaults are left out
    given = (q.new_empty(0) if x is None else torch.empty_like(x) for x in learned)
    if sizes := (*options[11:], None)[0]:
        return room(q, sizes[0]), room(k, sizes[1]), room(v, sizes[1]), *given
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *given


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor, Tensor, list[Tensor]],
) -> None:
    q, k, v, _, scale, *_ = inputs
    softcap, sinks, slopes, table, mask_mod, dropout_p, seed, _ = inputs[9:]
    out, lse, handle, kept = output
    sizes = [q.shape[2], k.shape[2]] if kept else None
    if kept:
        q, k, v = executor.rowless(q, k, v)
    ctx.numbers = scale, softcap, mask_mod, dropout_p, sizes  # type: ignore[attr-defined]
    ctx.save_for_backward(q, k, v, out, lse, sinks, slopes, table, seed, handle, *kept)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    given = len(ctx.needs_input_grad)  # type: ignore[attr-defined]  # defaults are left out
    if grad is None:
        return (None,) * given
    found = ctx.saved_tensors  # type: ignore[attr-defined]
    saved, (sinks, slopes, table, seed), held = found[:5], found[5:9], list(found[9:])
    scale, softcap, mask_mod, dropout_p, sizes = ctx.numbers  # type: ignore[attr-defined]
    dq, dk, dv, *grads = torch.ops.lightning_cp.attention_backward(
        grad, *saved, held, scale, softcap, sinks, slopes, table, mask_mod, dropout_p, seed, sizes
    )
    wanted = (None if x is None else y for x, y in zip((sinks, slopes, table), grads, strict=True))
    return (dq, dk, dv, *(None,) * 7, *wanted, None, None, None, None)[:given]


attention.register_autograd(_differentiate, setup_context=_save)
