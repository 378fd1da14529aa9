"""Registers the operators with torch: their names, shapes for the compiler, and backwards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cp.functional import operators

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **operators.COMMUNICATING,
    "positions": operators.positions,
    "real": operators.real,
    "scatter_sequence": operators.scatter_sequence,
    "scatter_sequence_backward": operators.scatter_sequence_backward,
}

OPERATORS = {
    name: torch.library.custom_op(f"lightning_cp::{name}", function, mutates_args=())
    for name, function in _FUNCTIONS.items()
}
"""Operators of the namespace `lightning_cp`, by name."""


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _with_handle(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(x), torch.empty((), dtype=torch.int64)


def _resized(x: Tensor, dim: int, size: Any) -> Tensor:
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def _of_unknown_size(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return _resized(x, dim, size), torch.empty((), dtype=torch.int64)


def _summing(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if x.is_floating_point() else torch.int64
    return _like(x.to(dtype)), torch.empty((), dtype=torch.int64)


def _sums(values: Tensor, weights: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = operators.accumulator(values.dtype)
    total, weight = (_resized(x, dim, 1).to(dtype) for x in (values, weights))
    return total, weight, torch.empty((), dtype=torch.int64)


_FAKES: dict[str, Callable[..., Any]] = {
    "positions": lambda anchor, size: anchor.new_empty(size, dtype=torch.int64),
    "real": lambda anchor, size: anchor.new_empty(size, dtype=torch.bool),
    "group_sum": _with_handle,
    "group_sum_backward": _like,
    "sequence_sums": _sums,
    "sequence_sums_backward": lambda grad, of_weights, handle, dim, size, dtype: (
        _resized(grad, dim, size).to(dtype),
        _resized(of_weights, dim, size).to(dtype),
    ),
    "sequence_max": lambda x, dim: _with_handle(_resized(x, dim, 1)),
    "sequence_max_backward": lambda grad, x, highest, handle, dim: _like(x),
    "gather_sequence": _of_unknown_size,
    "gather_sequence_backward": lambda grad, handle, dim, size: _resized(grad, dim, size),
    "scatter_sequence": _of_unknown_size,
    "scatter_sequence_backward": lambda grad, handle, dim, size: _resized(grad, dim, size),
    "shift_labels": _like,
    "cumsum": _summing,
    "cumsum_backward": _like,
    "global_softmax": _with_handle,
    "global_softmax_backward": _like,
}
for _name, _fake in _FAKES.items():
    OPERATORS[_name].register_fake(_fake)


def _differentiable(
    name: str,
    save: Callable[[tuple[Any, ...], Tensor], tuple[tuple[Tensor, ...], tuple[Any, ...]]],
) -> None:
    """Register the backward of an operator whose last output is a handle.

    Args:
        name: the operator; its backward is called with the gradients of the other outputs.
        save: from inputs and first output what the backward also gets: tensors, with the handle
            put behind them, and other values.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, ctx.values = save(inputs, output[0])
        ctx.save_for_backward(*tensors, output[-1])
        ctx.count = len(inputs)

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        call = getattr(torch.ops.lightning_cp, f"{name}_backward")
        found = call(*grads[:-1], *ctx.saved_tensors, *ctx.values)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *(None,) * (ctx.count - len(found))

    OPERATORS[name].register_autograd(backward, setup_context=setup)


_differentiable("group_sum", lambda inputs, out: ((), ()))
_differentiable(
    "sequence_sums",
    lambda inputs, out: ((), (inputs[2], inputs[0].shape[inputs[2]], inputs[0].dtype)),
)
_differentiable("sequence_max", lambda inputs, out: ((inputs[0], out), (inputs[1],)))
_differentiable("cumsum", lambda inputs, out: ((), (inputs[1],)))
_differentiable("global_softmax", lambda inputs, out: ((out,), (inputs[1],)))
for _name in ("gather_sequence", "scatter_sequence"):
    _differentiable(_name, lambda inputs, out: ((), (inputs[1], inputs[0].shape[inputs[1]])))
