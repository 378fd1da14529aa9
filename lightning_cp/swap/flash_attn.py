"""Calls of the package flash_attn 2.x under context parallelism, at its registered operators.

Legend: B batch, S local tokens, N = B * S, H query heads, K key heads, D head size.

[Note: operators of flash_attn] Every function of the package ends in one of four registered
operators, however it was imported, compiled or recomputed; the operators are overridden where they
run, so that a compiled graph serves every batch. A forward hands its backward the output, the LSE
and the state of the random numbers. Here the latter carries the seed of dropped weights and the
handle of the plan, and a backward knows by it that its forward was a context's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.attention import backward_implementation, draw_seed, forward_implementation
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap._torch import keys, wrap_kernel
from lightning_cp.swap.dropped import kept_dropout
from lightning_cp.swap.lengths import Lengths, packed
from lightning_cp.swap.where import caller

Call = Mapping[str, Any]
Plain = Callable[[Call], Any]

NAMESPACE = "flash_attn"
MARK = 0x6C63702E
"""Upper half of the first element of a random state of which the second is the handle of a plan."""

SEED_BITS = 32
"""Size of the lower half, which holds the seed."""

UNKNOWN = {
    "block_table": "a paged cache of keys",
    "leftpad_k": "padding on the left of keys",
    "seqused_k": "keys that are not used",
}
"""Arguments that change the result, with what they are, that must be None."""


def is_registered() -> bool:
    """Whether the package has been imported, in a version that registers operators."""
    return hasattr(getattr(torch.ops, NAMESPACE), next(iter(OPERATORS)))


def install(device_types: Iterable[str]) -> list[Callable[[], None]]:
    """Override the operators of the package, where it has been imported.

    Args:
        device_types: device types whose calls are seen.

    Returns:
        What puts each operator back.
    """
    found = [
        wrap_kernel(name, keys(kind)[1], make, NAMESPACE)
        for kind in device_types
        for name, make in OPERATORS.items()
    ]
    return [undo for undo in found if undo is not None]


def _forward(plain: Plain) -> Plain:
    """Rows of a batch: `[B, S, H, D]`, the LSE `[B, H, S]`."""

    def forward(call: Call) -> Any:
        context = SLOT.current
        if context is None:
            SLOT.count_plain_attention()
            return plain(call)
        q, k, v = (call[name].transpose(1, 2) for name in "qkv")
        out, lse, state = _attend(context, call, q, k, v)
        return out.transpose(1, 2), lse, q.new_empty(0), state

    return forward


def _varlen_forward(plain: Plain) -> Plain:
    """Rows one after the other: `[N, H, D]`, the LSE `[H, N]`."""
    lengths = Lengths()

    def forward(call: Call) -> Any:
        context = SLOT.current
        if context is None:
            SLOT.count_plain_attention()
            return plain(call)
        with named(context):
            rows = [
                lengths.check(context, call[n], call[f"cu_seqlens_{n}"], is_causal=call["causal"])
                for n in "qk"
            ]
        q, k, v = (
            heads_first(call[n], x.batch) for n, x in zip("qkv", (*rows, rows[1]), strict=True)
        )
        out, lse, state = _attend(context, call, q, k, v)
        return (
            out.transpose(1, 2).flatten(0, 1),
            lse.transpose(0, 1).flatten(1),
            q.new_empty(0),
            state,
        )

    return forward


def _backward(plain: Plain) -> Plain:
    def backward(call: Call) -> Any:
        made = _made(call["rng_state"])
        if made is None:
            return plain(call)
        rows = {n: call[n].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")}
        grads = _differentiate(call, rows, call["softmax_lse"], made)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            call[name].copy_(grad.transpose(1, 2))
        return torch.zeros_like(call["softmax_lse"])

    return backward


def _varlen_backward(plain: Plain) -> Plain:
    def backward(call: Call) -> Any:
        made = _made(call["rng_state"])
        if made is None:
            return plain(call)
        context = SLOT.bound(made.handle).context
        batch = {n: packed(context, call[n].shape[0]).batch for n in ("q", "k")}
        rows = {n: heads_first(call[n], batch["q"]) for n in ("dout", "q", "out")}
        rows |= {n: heads_first(call[n], batch["k"]) for n in ("k", "v")}
        lse = call["softmax_lse"].unflatten(1, (batch["q"], -1)).transpose(0, 1)
        grads = _differentiate(call, rows, lse, made)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            call[name].copy_(grad.transpose(1, 2).flatten(0, 1))
        return torch.zeros_like(call["softmax_lse"])

    return backward


OPERATORS: dict[str, Callable[[Plain], Plain]] = {
    "_flash_attn_forward": _forward,
    "_flash_attn_varlen_forward": _varlen_forward,
    "_flash_attn_backward": _backward,
    "_flash_attn_varlen_backward": _varlen_backward,
}
"""By name in `torch.ops.flash_attn`, each with what makes its replacement from the original."""


def _attend(
    context: Context, call: Call, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, S, D]` and LSE of attention over the whole sequence, and a random state."""
    before, after = call["window_size_left"], call["window_size_right"]
    slopes = call["alibi_slopes"]
    with named(context):
        _refuse(call)
        dropout_p = kept_dropout(context, call["dropout_p"])
        seed = draw_seed(dropout_p, bits=SEED_BITS)
        if call["causal"] or slopes is not None or max(before, after) >= 0:
            check_alignment(context, q, k)
        out, lse, handle, _ = forward_implementation(
            q,
            k,
            v,
            bool(call["causal"]),
            call["softmax_scale"],
            max(before, -1),
            max(after, -1),
            softcap=max(call["softcap"], 0.0),
            slopes=slopes,
            dropout_p=dropout_p,
            seed=seed,
        )
    mark = MARK << SEED_BITS | (0 if seed is None else int(seed))
    return out, lse, torch.tensor([mark, int(handle)])


def check_alignment(context: Context, q: Tensor, k: Tensor) -> None:
    """Refuse what counts distances between sequences of different lengths.

    Args:
        context: the active context.
        q: `[B, H, S, D]`.
        k: `[B, K, S_of_keys, D]`.

    Raises:
        RefusedError: if the whole sequences have different lengths.
    """
    lengths = [context.held(x.shape[2]).length for x in (q, k)]
    if lengths[0] != lengths[1]:
        raise RefusedError(
            f"flash_attn aligns causality, windows and slopes at the last of {lengths[0]} queries "
            f"and {lengths[1]} keys, context parallelism at the first; leave them off between "
            f"sequences of different lengths"
        )


def _differentiate(
    call: Call, rows: Mapping[str, Tensor], lse: Tensor, made: "_Made"
) -> tuple[Tensor, ...]:
    context = SLOT.bound(made.handle).context
    with _deterministic(call["deterministic"]):
        return backward_implementation(
            rows["dout"],
            rows["q"],
            rows["k"],
            rows["v"],
            rows["out"],
            lse,
            [torch.tensor(made.handle)],
            call["softmax_scale"],
            softcap=max(call["softcap"], 0.0),
            slopes=call["alibi_slopes"],
            dropout_p=kept_dropout(context, call["dropout_p"]),
            seed=torch.tensor(made.seed),
        )[:3]


def _refuse(call: Call) -> None:
    if call["return_softmax"]:
        raise RefusedError(
            "return_attn_probs=True with dropout asks for weights of every query and key, which "
            "never exist in one place; leave it off"
        )
    slopes = call["alibi_slopes"]
    if slopes is not None and slopes.ndim != 1:
        raise RefusedError(
            f"alibi_slopes of shape {tuple(slopes.shape)} for every row its own are not supported "
            f"under context parallelism; pass one number for each query head, [H]"
        )
    for name, what in UNKNOWN.items():
        if call.get(name) is not None:
            raise RefusedError(f"{what} ({name}) is not supported under context parallelism")


class _Made(NamedTuple):
    """What a forward in a context left for its backward."""

    handle: int
    seed: int


def _made(state: Tensor | None) -> _Made | None:
    """What a random state carries, None where a forward outside any context made it."""
    if state is None or state.device.type != "cpu" or state.numel() != 2:
        return None
    mark, handle = state.tolist()
    return _Made(handle, mark % 2**SEED_BITS) if mark >> SEED_BITS == MARK else None


@contextmanager
def named(context: Context) -> Iterator[None]:
    """Says in messages who called."""
    try:
        yield
    except RefusedError as error:
        raise RefusedError(f"{caller(context)}: {error}") from error


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Let kernels choose what gives the same bits every time."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and not before:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if wanted and not before:
            torch.use_deterministic_algorithms(before, warn_only=warn)


def heads_first(x: Tensor, batch: int) -> Tensor:
    """`[B * S, H, D]` as `[B, H, S, D]`."""
    split: Tensor = x.unflatten(0, (batch, -1))
    return split.transpose(1, 2)
