"""Calls of the package flash_attn 2.x under context parallelism, at its registered operators.

Legend: B batch, S local tokens, N = B * S, H query heads, K key heads, D head size.

[Note: operators of flash_attn] Every function of the package ends in one of four registered
operators, however it was imported, compiled or recomputed; the operators are overridden where they
run, so that a compiled graph serves every batch. A forward hands its backward the output, the LSE
and the state of the random numbers. Without dropout nobody reads the latter: it carries the handle
of the plan, and a backward knows by it that its forward was a context's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention import backward_implementation, forward_implementation
from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap._torch import keys, wrap_kernel
from lightning_cp.swap.lengths import Lengths, packed
from lightning_cp.swap.where import caller

Call = Mapping[str, Any]
Plain = Callable[[Call], Any]

NAMESPACE = "flash_attn"
MARK = 0x6C63702E706C616E
"""First element of a random state of which the second is the handle of a plan."""

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
        out, lse, handle = _attend(context, call, q, k, v)
        return out.transpose(1, 2), lse, q.new_empty(0), _state(handle)

    return forward


def _varlen_forward(plain: Plain) -> Plain:
    """Rows one after the other: `[N, H, D]`, the LSE `[H, N]`."""
    lengths = Lengths()

    def forward(call: Call) -> Any:
        context = SLOT.current
        if context is None:
            SLOT.count_plain_attention()
            return plain(call)
        with _named(context):
            rows = [
                lengths.check(context, call[n], call[f"cu_seqlens_{n}"], is_causal=call["causal"])
                for n in "qk"
            ]
        q, k, v = (_rows(call[n], x.batch) for n, x in zip("qkv", (*rows, rows[1]), strict=True))
        out, lse, handle = _attend(context, call, q, k, v)
        return (
            out.transpose(1, 2).flatten(0, 1),
            lse.transpose(0, 1).flatten(1),
            q.new_empty(0),
            _state(handle),
        )

    return forward


def _backward(plain: Plain) -> Plain:
    def backward(call: Call) -> Any:
        handle = _handle(call["rng_state"])
        if handle is None:
            return plain(call)
        rows = {n: call[n].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")}
        grads = _differentiate(call, rows, call["softmax_lse"], handle)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            call[name].copy_(grad.transpose(1, 2))
        return torch.zeros_like(call["softmax_lse"])

    return backward


def _varlen_backward(plain: Plain) -> Plain:
    def backward(call: Call) -> Any:
        handle = _handle(call["rng_state"])
        if handle is None:
            return plain(call)
        context = SLOT.bound(handle).context
        batch = {n: packed(context, call[n].shape[0]).batch for n in ("q", "k")}
        rows = {n: _rows(call[n], batch["q"]) for n in ("dout", "q", "out")}
        rows |= {n: _rows(call[n], batch["k"]) for n in ("k", "v")}
        lse = call["softmax_lse"].unflatten(1, (batch["q"], -1)).transpose(0, 1)
        grads = _differentiate(call, rows, lse, handle)
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
    """Output, LSE and handle of attention over the whole sequence; `[B, H, S, D]`."""
    before, after = call["window_size_left"], call["window_size_right"]
    slopes = call["alibi_slopes"]
    with _named(context):
        _refuse(call)
        if call["causal"] or slopes is not None or max(before, after) >= 0:
            lengths = [context.sequence_of(x.shape[2]).length for x in (q, k)]
            if lengths[0] != lengths[1]:
                raise RefusedError(
                    f"flash_attn aligns causality, windows and slopes at the last of {lengths[0]} "
                    f"queries and {lengths[1]} keys, context parallelism at the first; leave them "
                    f"off between sequences of different lengths"
                )
        return forward_implementation(
            q,
            k,
            v,
            bool(call["causal"]),
            call["softmax_scale"],
            max(before, -1),
            max(after, -1),
            softcap=max(call["softcap"], 0.0),
            slopes=slopes,
        )


def _differentiate(
    call: Call, rows: Mapping[str, Tensor], lse: Tensor, handle: int
) -> tuple[Tensor, ...]:
    with _deterministic(call["deterministic"]):
        return backward_implementation(
            rows["dout"],
            rows["q"],
            rows["k"],
            rows["v"],
            rows["out"],
            lse,
            torch.tensor(handle),
            call["softmax_scale"],
            softcap=max(call["softcap"], 0.0),
            slopes=call["alibi_slopes"],
        )[:3]


def _refuse(call: Call) -> None:
    if call["dropout_p"] > 0:
        raise RefusedError(
            f"attention dropout of {call['dropout_p']} is not supported under context parallelism "
            f"(a rank would repeat or skip random numbers); set the attention dropout to 0, other "
            f"dropout may stay"
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


def _state(handle: Tensor) -> Tensor:
    """What stands for the random state of a forward; see the note on top."""
    return torch.tensor([MARK, int(handle)])


def _handle(state: Tensor | None) -> int | None:
    """The handle in a random state, None where a forward outside any context made it."""
    if state is None or state.device.type != "cpu" or state.numel() != 2:
        return None
    mark, handle = state.tolist()
    return handle if mark == MARK else None


@contextmanager
def _named(context: Context) -> Iterator[None]:
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


def _rows(x: Tensor, batch: int) -> Tensor:
    """`[B * S, H, D]` as `[B, H, S, D]`."""
    split: Tensor = x.unflatten(0, (batch, -1))
    return split.transpose(1, 2)
