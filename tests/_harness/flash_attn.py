"""A stand-in for the package flash_attn 2.x on CPUs: its functions, its operators, its layouts.

Names, arguments, defaults, shapes and dtypes are those that the package documents; `SIGNATURES` and
`SCHEMAS` write them down, and a test compares them where the real package is installed. The maths
is plain. What the CUDA sources require of sizes and dtypes of lengths is asserted; a window as wide
as the longest sequence is none, as it is there.

Legend: B batch, S rows, N tokens of all sequences, H query heads, K key heads, D head size.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {OPTIONS})",
    "flash_attn_kvpacked_func": f"(q, kv, {OPTIONS})",
    "flash_attn_qkvpacked_func": f"(qkv, {OPTIONS})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {OPTIONS}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {OPTIONS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {OPTIONS})",
}
"""Public functions of the package, with their arguments."""

_VISIBLE = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes"
)
_OPEN = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None"
)
_CUT = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GRADS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)
SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_VISIBLE}, bool return_softmax)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_CUT}, {_OPEN}, bool return_softmax=False, "
        "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
        "bool zero_tensors=False, SymInt num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_backward": (
        f"({_GRADS}, {_VISIBLE}, bool deterministic, Tensor? rng_state=None) -> Tensor"
    ),
    "_flash_attn_varlen_backward": (
        f"({_GRADS}, {_CUT}, {_VISIBLE}, bool deterministic, Tensor? rng_state=None, "
        "bool zero_tensors=False) -> Tensor"
    ),
}
"""Operators of the package, in namespace `flash_attn`."""


class Call(NamedTuple):
    """One call of an operator, by argument."""

    name: str
    arguments: dict[str, Any]


CALLS: list[Call] = []
"""What was computed by the stand-in itself, since the last `installed`."""


def _state(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _heads_first(x: Tensor, repeats: int = 1) -> Tensor:
    """`[..., S, H, D]` as `[..., H * repeats, S, D]` in the dtype of the computation."""
    return _state(x).repeat_interleave(repeats, -2).transpose(-3, -2)


def _scores(q: Tensor, k: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Scores, -inf where hidden, and their derivative by the products; aligned bottom right."""
    scores = q @ k.mT * call["softmax_scale"]
    slope = torch.ones_like(scores)
    if call["softcap"] > 0:
        capped = torch.tanh(scores / call["softcap"])
        scores, slope = capped * call["softcap"], 1 - capped.square()
    n, m = scores.shape[-2:]
    distance = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    if call["alibi_slopes"] is not None:
        slopes = call["alibi_slopes"].to(scores.dtype)
        scores = scores - slopes[..., None, None] * distance.abs()
    left, right = call["window_size_left"], 0 if call["causal"] else call["window_size_right"]
    longest = call.get("max_seqlen_k", m)
    left, right = (-1 if side >= longest else side for side in (left, right))
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return scores.masked_fill(hidden, -math.inf), slope


def _attend(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output `[..., S, H, D]` and LSE `[..., H, S]` of whole sequences; +inf where none is seen."""
    repeats = q.shape[-2] // k.shape[-2]
    scores, _ = _scores(_heads_first(q), _heads_first(k, repeats), call)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    out = (scores - lse.unsqueeze(-1)).exp() @ _heads_first(v, repeats)
    return out.transpose(-3, -2).to(q.dtype), lse


def _differentiate(
    rows: tuple[Tensor, ...], k: Tensor, v: Tensor, call: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of whole sequences; `rows` are dout, q, out and the LSE."""
    dout, q, out, lse = rows
    repeats = q.shape[-2] // k.shape[-2]
    grad, queries, o = (_heads_first(x) for x in (dout, q, out))
    keys, values = (_heads_first(x, repeats) for x in (k, v))
    scores, slope = _scores(queries, keys, call)
    p = (scores - lse.unsqueeze(-1)).exp()
    delta = (grad * o).sum(-1, keepdim=True)
    ds = p * (grad @ values.mT - delta) * slope * call["softmax_scale"]
    found = (x.transpose(-3, -2) for x in (ds @ keys, ds.mT @ queries, p.mT @ grad))
    dq, *shared = found
    dk, dv = (x.unflatten(-2, (k.shape[-2], repeats)).sum(-2) for x in shared)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _check(call: dict[str, Any]) -> None:
    assert call["dropout_p"] == 0
    q, k, v = call["q"], call["k"], call["v"]
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    slopes = call["alibi_slopes"]
    assert slopes is None or (slopes.dtype == torch.float32 and slopes.shape[-1] == q.shape[-2])
    for name in ("block_table", "leftpad_k", "seqused_k"):
        assert call.get(name) is None


def _sequences(call: dict[str, Any]) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Where the rows and keys of every sequence lie, and what its part of the call is."""
    q_edges, k_edges = call["cu_seqlens_q"], call["cu_seqlens_k"]
    assert q_edges.dtype == k_edges.dtype == torch.int32
    assert q_edges.shape == k_edges.shape
    assert (int(q_edges[-1]), int(k_edges[-1])) == (call["q"].shape[0], call["k"].shape[0])
    spans = zip(pairwise(q_edges.tolist()), pairwise(k_edges.tolist()), strict=True)
    for index, ((a, b), (c, d)) in enumerate(spans):
        assert b - a <= call["max_seqlen_q"]
        assert d - c <= call["max_seqlen_k"]
        slopes = call["alibi_slopes"]
        own = slopes[index] if slopes is not None and slopes.ndim == 2 else slopes
        yield slice(a, b), slice(c, d), {**call, "alibi_slopes": own}


def _results(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _forward(call: dict[str, Any]) -> tuple[Tensor, ...]:
    _check(call)
    return _results(call["q"], *_attend(call["q"], call["k"], call["v"], call))


def _varlen_forward(call: dict[str, Any]) -> tuple[Tensor, ...]:
    _check(call)
    q, k, v = call["q"], call["k"], call["v"]
    out = torch.empty_like(q)
    lse = _state(q).new_empty(q.shape[1], q.shape[0])
    for rows, keys, own in _sequences(call):
        out[rows], lse[:, rows] = _attend(q[rows], k[keys], v[keys], own)
    return _results(q, out, lse)


def _write(call: dict[str, Any], grads: tuple[Tensor, ...], *where: Any) -> None:
    for name, grad, place in zip(("dq", "dk", "dv"), grads, where, strict=True):
        call[name][place] = grad


def _backward(call: dict[str, Any]) -> Tensor:
    _check(call)
    rows = tuple(call[name] for name in ("dout", "q", "out", "softmax_lse"))
    _write(call, _differentiate(rows, call["k"], call["v"], call), ..., ..., ...)
    return torch.zeros_like(call["softmax_lse"])


def _varlen_backward(call: dict[str, Any]) -> Tensor:
    _check(call)
    for rows, keys, own in _sequences(call):
        saved = (*(call[n][rows] for n in ("dout", "q", "out")), call["softmax_lse"][:, rows])
        grads = _differentiate(saved, call["k"][keys], call["v"][keys], own)
        _write(call, grads, rows, keys, keys)
    return torch.zeros_like(call["softmax_lse"])


COMPUTE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "_flash_attn_forward": _forward,
    "_flash_attn_varlen_forward": _varlen_forward,
    "_flash_attn_backward": _backward,
    "_flash_attn_varlen_backward": _varlen_backward,
}


def arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator's call by name, with the defaults of its schema."""
    known = getattr(torch.ops.flash_attn, name).default._schema.arguments
    defaults = {a.name: a.default_value for a in known if a.has_default_value()}
    return defaults | dict(zip((a.name for a in known), args, strict=False)) | kwargs


def _define() -> None:
    """The operators as the package registers them, but for CPU tensors."""
    for name, schema in SCHEMAS.items():
        torch.library.define(f"flash_attn::{name}", schema)

        def operator(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            call = arguments(_name, args, kwargs)
            CALLS.append(Call(_name, call))
            return COMPUTE[_name](call)

        def fake(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            call = arguments(_name, args, kwargs)
            q = call["q"]
            rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
            lse = _state(q).new_empty(rows)
            return lse if "backward" in _name else _results(q, torch.empty_like(q), lse)

        torch.library.impl(f"flash_attn::{name}", "cpu", operator)
        torch.library.register_fake(f"flash_attn::{name}", fake)


class _Function(torch.autograd.Function):
    """What every function of the package does: heads are padded to a multiple of 8."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Any, options: Any) -> Any:
        ctx.size = q.shape[-1]
        q, k, v = (F.pad(x, (0, -ctx.size % 8)) for x in (q, k, v))
        dropout, scale, causal, window, softcap, slopes, ctx.deterministic = options
        ctx.options = (dropout, scale, causal, *window, softcap, slopes)
        ctx.lengths = lengths[:4]
        forward = torch.ops.flash_attn
        if lengths:
            found = forward._flash_attn_varlen_forward(
                q, k, v, *ctx.lengths, *ctx.options, return_softmax=False, block_table=lengths[4]
            )
        else:
            found = forward._flash_attn_forward(q, k, v, *ctx.options, return_softmax=False)
        out, lse, probabilities, state = found
        ctx.save_for_backward(q, k, v, out, lse, state)
        return out[..., : ctx.size], lse, probabilities

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dout = F.pad(grads[0], (0, -ctx.size % 8))
        kind = "_varlen" if ctx.lengths else ""
        getattr(torch.ops.flash_attn, f"_flash_attn{kind}_backward")(
            *(dout, q, k, v, out, lse, dq, dk, dv, *ctx.lengths, *ctx.options),
            ctx.deterministic,
            rng_state=state,
        )
        return *(x[..., : ctx.size] for x in (dq, dk, dv)), None, None


def _function(name: str) -> Callable[..., Any]:
    """A public function with the package's signature."""
    space: dict[str, Any] = {}
    exec(f"def {name}{SIGNATURES[name]}: pass", space)
    signature = inspect.signature(space[name])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if "qkv" in call:
            q, k, v = call["qkv"].unbind(-3)
        elif "kv" in call:
            q, (k, v) = call["q"], call["kv"].unbind(-3)
        else:
            q, k, v = (call[name] for name in "qkv")
        lengths: tuple[Any, ...] = ()
        if "cu_seqlens" in call:
            lengths = (*(call["cu_seqlens"],) * 2, *(call["max_seqlen"],) * 2, None)
        elif "cu_seqlens_q" in call:
            lengths = (*(call[name] for name in LENGTHS.split(", ")), call.get("block_table"))
        scale = q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
        options = (
            *(call["dropout_p"], scale, call["causal"], call["window_size"], call["softcap"]),
            *(call["alibi_slopes"], call["deterministic"]),
        )
        found = _Function.apply(q, k, v, lengths, options)  # type: ignore[no-untyped-call]
        return found if call["return_attn_probs"] else found[0]

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Attention over a cache, which goes by none of the registered operators."""
    call = {"softmax_scale": q.shape[-1] ** -0.5, "softcap": 0.0, "alibi_slopes": None}
    open_ = {"window_size_left": -1, "window_size_right": -1, "causal": False}
    return _attend(q, k_cache, v_cache, call | open_)[0]


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Within it `import flash_attn` finds the stand-in, which it gives."""
    if not hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        _define()
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name in SIGNATURES:
        setattr(interface, name, _function(name))
    interface.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    vars(package).update({k: v for k, v in vars(interface).items() if k.startswith("flash")})
    package.__version__ = "2.8.4"  # type: ignore[attr-defined]
    package.__path__ = []
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    CALLS.clear()
    sys.modules.update({x.__name__: x for x in (package, interface)})
    try:
        yield package
    finally:
        for module in (package, interface):
            del sys.modules[module.__name__]
