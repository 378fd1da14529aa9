"""`multi_head_attention_forward`, which `nn.MultiheadAttention` calls, under context parallelism.

Inside a context the attention itself goes through `scaled_dot_product_attention`, which is
overridden; what is done here is to say what the masks of one device mean on a part of the sequence,
and to put something in place of the weights, which no rank has.

[Note: compiled multi-head attention] A graph runs with and without a context, so it must not depend
on the one that is active while it is traced. Without masks its output is that of the operator in
both. The weights are a branch of their own behind `outside_only`: a graph that does not use them
drops it, one that does gives torch's weights without a context and refuses within one.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from lightning_cp.context import SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.swap._torch import is_tracing
from lightning_cp.swap.guard import outside_only
from lightning_cp.swap.sdpa import check_padding
from lightning_cp.swap.shared import is_shared
from lightning_cp.swap.where import caller

Output = tuple[Tensor, Any]
T = TypeVar("T")

WEIGHTS = (
    "the attention weights of nn.MultiheadAttention are not computed under context parallelism, "
    "because no rank holds whole rows of them; pass need_weights=False and do not use them, or "
    "wrap the call in functional.local() where it is meant for this rank's tokens alone"
)
EXTRA_KEYS = {
    "bias_k": "add_bias_kv=True",
    "bias_v": "add_bias_kv=True",
    "static_k": "static_k",
    "static_v": "static_v",
    "add_zero_attn": "add_zero_attn=True",
}
"""Arguments that give a rank keys which are not its tokens, and what a user calls them."""

WEIGHTS_OF_LAYERS = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "out_proj_weight",
)


def multi_head_attention_forward(original: Callable[..., Output]) -> Callable[..., Output]:
    """The replacement of the function of this name, made from torch's own.

    Outside a context it is torch's. Inside one every rank passes `[S_local, B, E]` and gets its
    part of the output; with `need_weights` it gets an object in place of the weights that raises
    on any use. A `key_padding_mask` must be the batch's padding. An `attn_mask` must be the causal
    triangle of the local size and come with `is_causal=True`: causal over the whole sequence.

    Args:
        original: torch's function.

    Raises:
        RefusedError: from a call, for other masks, for additional keys (`add_bias_kv`,
            `add_zero_attn`, static keys), for weights that are cut between ranks that share
            layers, and for what attention itself refuses.
    """
    parameters = inspect.signature(original).parameters
    names = tuple(parameters)
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Output:
        call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        # Before torch 2.12 the function stays one node of the graph, and is called while that is
        # made: not compiling any more, but with fake tensors.
        if torch.compiler.is_compiling() or is_tracing(call["query"]):
            return _traced(original, call)
        context = SLOT.current
        if context is not None:
            return _sharded(original, call, context)
        if call["need_weights"]:  # else it arrives at scaled_dot_product_attention
            SLOT.count_plain_attention()
        return original(**call)

    return forward


BINARY = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
OTHER = (
    "neg pos abs invert lt le gt ge eq ne len iter getitem setitem contains bool int float complex "
    "index array call setattr delattr"
)
"""Names of special methods without their underscores."""


def _refuse_every_use(cls: type[T]) -> type[T]:
    for side in ("", "r"):
        for name in BINARY.split():
            setattr(cls, f"__{side}{name}__", cls._refuse)  # type: ignore[attr-defined]
    for name in OTHER.split():
        setattr(cls, f"__{name}__", cls._refuse)  # type: ignore[attr-defined]
    return cls


@_refuse_every_use
class NoWeights:
    """Stands where attention weights would be; whatever is done with it raises `RefusedError`.

    Args:
        shape: what the shape of the weights would be.
    """

    __slots__ = ("_shape",)

    def __init__(self, shape: tuple[int, ...]) -> None:
        object.__setattr__(self, "_shape", shape)

    def __repr__(self) -> str:
        return f"<attention weights {list(self._shape)}, not computed under context parallelism>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks everything for these, to see what it can do
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RefusedError(
            f"{caller(SLOT.active)}: weights of shape {list(self._shape)}: {WEIGHTS}"
        )

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RefusedError(f"{caller(SLOT.active)}: {WEIGHTS}")

    __hash__ = object.__hash__


def _sharded(original: Callable[..., Output], call: dict[str, Any], context: Context) -> Output:
    """One call inside a context: without masks, which the context knows, and without weights."""
    for argument, option in EXTRA_KEYS.items():
        if call[argument] is not None and call[argument] is not False:
            raise RefusedError(
                f"{caller(context)}: {option} gives each of the {context.world} ranks keys that "
                f"are no tokens of the sequence, where one device has them once; leave it out"
            )
    query, key = call["query"], call["key"]
    cut = [name for name in WEIGHTS_OF_LAYERS if is_shared(call[name])]
    if cut and not is_shared(query):
        raise RefusedError(
            f"{caller(context)}: of nn.MultiheadAttention {', '.join(cut)} are cut between ranks "
            f"that share layers, but it calls none of its layers and multiplies with whole "
            f"weights; leave it out of the plan, so that each of these ranks has all of it, or "
            f"take attention with linear layers for q, k, v and the output"
        )
    _check_mask(context, call)
    padding = call["key_padding_mask"]
    if padding is not None:
        visible = ~padding if padding.dtype == torch.bool else padding
        if visible.ndim > 1:
            visible = visible[:, None, None, :]
        check_padding(context, visible, size=key.shape[0], ndim=4)
    out, _ = original(**{**call, "key_padding_mask": None, "need_weights": False})
    if not call["need_weights"]:
        return out, None
    lengths = [context.held(x.shape[0]).length for x in (query, key)]
    heads = () if call["average_attn_weights"] else (call["num_heads"],)
    return out, NoWeights((*query.shape[1:-1], *heads, *lengths))


def _check_mask(context: Context, call: dict[str, Any]) -> None:
    """A mask must be the local causal triangle, and `is_causal` must say that it is meant."""
    mask, sizes = call["attn_mask"], (call["query"].shape[0], call["key"].shape[0])
    if mask is None:
        return
    rows = call["num_heads"] * (call["query"].shape[1] if call["query"].ndim == 3 else 1)
    if not call["is_causal"]:
        raise RefusedError(
            f"{caller(context)}: a dense attention mask of shape {tuple(mask.shape)} covers only "
            f"the {sizes[1]} keys of this rank; pass is_causal=True beside it if it is the causal "
            f"triangle, which then means the whole sequence, and the batch's 'attention_mask' "
            f"[B, S] for padding, in place of attn_mask"
        )
    fits = sizes[0] == sizes[1] and tuple(mask.shape) in (sizes, (rows, *sizes))
    if not fits or not _is_triangle(mask):
        raise RefusedError(
            f"{caller(context)}: is_causal=True, but attn_mask of shape {tuple(mask.shape)} is not "
            f"the causal triangle over the {sizes[1]} keys of this rank (True or -inf after the "
            f"query, else False or 0); pass generate_square_subsequent_mask({sizes[1]})"
        )


def _is_triangle(mask: Tensor) -> bool:
    """Whether a mask hides exactly the keys after the query, in every head."""
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype == torch.bool:
        return bool((mask == later).all())
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(torch.where(later, hidden, mask == 0).all())


def _traced(original: Callable[..., Output], call: dict[str, Any]) -> Output:
    """One call in code that is compiled; see the note on top."""
    if not call["need_weights"]:
        return original(**call)
    guarded = {**call, "query": outside_only(call["query"], WEIGHTS)}
    if call["dropout_p"] > 0 and call["training"]:  # output and weights drop the same elements
        return original(**guarded)
    out, _ = original(**{**call, "need_weights": False})
    return out, original(**guarded)[1]
