"""Functions for model code that must know it works on a part of the sequence.

Each computes over the whole sequence, of which every rank holds a part, with its exact gradient;
dummy tokens that fill up short sequences never count. All ranks of the context-parallel group call
together. Outside an active context, and inside `local()`, each has its single-device meaning, so
model code that calls them needs no switch. Under torch.compile they work without a graph break,
except `local`, and `gather_sequence` and `scatter_sequence`, whose results have a size that only
the batch knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from lightning_cp.context import SLOT
from lightning_cp.errors import RefusedError
from lightning_cp.functional import registration as _registration  # noqa: F401 (makes the operators)
from lightning_cp.functional.operators import lowest as _lowest
from lightning_cp.functional.weights import aligned as _aligned
from lightning_cp.functional.weights import axis as _axis
from lightning_cp.functional.weights import weighed as _weighed
from lightning_cp.mask import MaskMod

__all__ = [
    "cumsum",
    "gather_sequence",
    "global_softmax",
    "local",
    "positions",
    "register_mask_mod",
    "scatter_sequence",
    "sequence_max",
    "sequence_mean",
    "sequence_sum",
    "shift_labels",
]


@contextmanager
def local() -> Iterator[None]:
    """Code inside works on this rank's tensors alone, as if there were no other ranks.

    For parts of a step that are meant to be local: a frozen teacher on replicated inputs,
    attention within one frame, generation in a callback. Attention and losses inside are not
    swapped, and nothing is checked. In compiled code it holds for torch's functions; those of this
    package look at the whole sequence there.
    """
    with SLOT.suspend():
        if not torch.compiler.is_compiling():
            yield
            return
        _enter()
        try:
            yield
        finally:
            _leave()


def _enter() -> None:
    """Part of a graph, and run wherever it is traced again: calls after it are local."""
    SLOT.suspended += 1


def _leave() -> None:
    SLOT.suspended -= 1


torch.compiler.allow_in_graph([_enter, _leave])


def register_mask_mod(name: str, function: MaskMod) -> None:
    """Give a function that hides keys a name, by which `attend(mask_mod=name)` finds it.

    Compiled code needs names; a function that is passed as it is gets one of its own. Every rank
    registers, in any order.

    Args:
        name: for good, in this process.
        function: see `lightning_cp.mask.MaskMod`.

    Raises:
        RefusedError: if the name is that of another function.
    """
    SLOT.mask_mods.declare(name, function)


def positions(size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Global positions of this rank's tokens, in place of `torch.arange(size)`.

    Args:
        size: number of local tokens, the size of the sequence dimension that the model sees.
        device: device of the result.

    Returns:
        int64 `[size]`. Inside a context: where in the whole sequence each local token lies (0 for
        dummy tokens that fill up short sequences). Outside: `0, 1, ..., size - 1`.

    Raises:
        RefusedError: if `size` is not this rank's share of a declared sequence.
    """
    anchor = torch.empty(0, device=device)
    found: Tensor = torch.ops.lightning_cp.positions(anchor, size)
    return found


def shift_labels(labels: Tensor, *, dim: int = -1, ignore_index: int = -100) -> Tensor:
    """Labels of the next token: what `labels[1:]` is to `logits[:-1]`, aligned with all logits.

    The token at position t gets the label of position t + 1, wherever that is held; the last
    position, and dummies, get `ignore_index`. Labels cross the borders of packed documents, as
    shifting does on one device: set the label of each document's first token to `ignore_index`.

    Args:
        labels: integers, this rank's tokens at `dim`.
        dim: the sequence dimension.
        ignore_index: the label of the last position.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        RefusedError: for labels that are no integers, or if the size at `dim` is not this rank's
            share of a declared sequence.
        PeerError: if another rank failed.
    """
    if labels.is_floating_point():
        raise RefusedError(
            f"shift_labels takes integers, not {labels.dtype}: it has no gradient; shift targets "
            f"of other kinds in the dataset"
        )
    found: Tensor = torch.ops.lightning_cp.shift_labels(labels, _axis(labels, dim), ignore_index)
    return found


def sequence_sum(
    x: Tensor, *, dim: int = 1, mask: Tensor | None = None, keepdim: bool = False
) -> Tensor:
    """Sum over all tokens of the sequence, the same on every rank.

    Args:
        x: this rank's tokens at `dim`.
        dim: the sequence dimension.
        mask: weights of the tokens, bool or numbers: `[S]`, or of the leading dimensions of `x` up
            to `dim` (`[B, S]`), or broadcastable to `x`. What False hides may be NaN.
        keepdim: keep `dim` with size 1.

    Returns:
        `x` without `dim`, in its dtype (int64 for integers and bool); half precision is added in
        float32.

    Raises:
        RefusedError: if the size at `dim` is not this rank's share of a declared sequence, or the
            mask does not fit.
        PeerError: if another rank failed.
    """
    dim = _axis(x, dim)
    values, weights = _weighed(x, mask, dim)
    total: Tensor = torch.ops.lightning_cp.sequence_sums(values, weights, dim)[0]
    total = total.to(values.dtype) if values.is_floating_point() else total
    return total if keepdim else total.squeeze(dim)


def sequence_mean(
    x: Tensor, *, dim: int = 1, mask: Tensor | None = None, keepdim: bool = False
) -> Tensor:
    """Mean over all tokens of the sequence, the same on every rank.

    Args:
        x: this rank's tokens at `dim`; integers and bool count as numbers of the default dtype.
        dim: the sequence dimension.
        mask: weights of the tokens; see `sequence_sum`. The mean divides by their sum over the
            whole sequence.
        keepdim: keep `dim` with size 1.

    Returns:
        `x` without `dim`; 0 where no token counts, on one device too.

    Raises:
        RefusedError: if the size at `dim` is not this rank's share of a declared sequence, or the
            mask does not fit.
        PeerError: if another rank failed.
    """
    dim = _axis(x, dim)
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    values, weights = _weighed(x, mask, dim)
    total, weight, _ = torch.ops.lightning_cp.sequence_sums(values, weights, dim)
    mean: Tensor = total / torch.where((total == 0) & (weight == 0), 1, weight)
    mean = mean.to(values.dtype)
    return mean if keepdim else mean.squeeze(dim)


def sequence_max(
    x: Tensor, *, dim: int = 1, mask: Tensor | None = None, keepdim: bool = False
) -> Tensor:
    """Largest element over all tokens of the sequence, the same on every rank.

    The gradient goes to the tokens that are the maximum, in even parts, on whatever ranks they are.

    Args:
        x: this rank's tokens at `dim`.
        dim: the sequence dimension.
        mask: which tokens count, bool or numbers other than 0; its shape as in `sequence_sum`.
        keepdim: keep `dim` with size 1.

    Returns:
        `x` without `dim`, in its dtype; the lowest number (-inf for floats) where no token counts,
        NaN where a token that counts is NaN.

    Raises:
        RefusedError: if the size at `dim` is not this rank's share of a declared sequence, or the
            mask does not fit.
        PeerError: if another rank failed.
    """
    dim = _axis(x, dim)
    if x.dtype == torch.bool:
        return sequence_max(x.to(torch.uint8), dim=dim, mask=mask, keepdim=keepdim).bool()
    if mask is not None:
        x = torch.where(_aligned(mask, x, dim) != 0, x, _lowest(x.dtype))
    found: Tensor = torch.ops.lightning_cp.sequence_max(x, dim)[0]
    return found if keepdim else found.squeeze(dim)


def gather_sequence(x: Tensor, *, dim: int = 1) -> Tensor:
    """The whole sequence on every rank, in global order and without dummies.

    Args:
        x: this rank's tokens at `dim`, any dtype.
        dim: the sequence dimension.

    Returns:
        `x` with the length of the sequence at `dim`. Each rank's gradient is its part of the sum
        of all ranks' gradients of the whole, 0 for dummies.

    Raises:
        RefusedError: if the size at `dim` is not this rank's share of a declared sequence.
        PeerError: if another rank failed.
    """
    whole: Tensor = torch.ops.lightning_cp.gather_sequence(x, _axis(x, dim))[0]
    return whole


def scatter_sequence(x: Tensor, *, dim: int = 1) -> Tensor:
    """This rank's tokens of a whole tensor, the inverse of `gather_sequence`.

    Args:
        x: the whole sequence at `dim`, equal on all ranks.
        dim: the sequence dimension.

    Returns:
        `x` with this rank's tokens at `dim`, 0 for dummies. The gradient is that of this rank's
        tokens among zeros: the mean over ranks that parameters get adds up the parts. A gradient
        of `x` itself that you look at is therefore this rank's part only, times the ranks.

    Raises:
        RefusedError: if the size at `dim` is no declared sequence's length.
    """
    part: Tensor = torch.ops.lightning_cp.scatter_sequence(x, _axis(x, dim))[0]
    return part


def cumsum(x: Tensor, *, dim: int) -> Tensor:
    """Running sum over the whole sequence in global order, in place of `torch.cumsum`.

    Only one sum per span of the layout travels.

    Args:
        x: this rank's tokens at `dim`.
        dim: the sequence dimension.

    Returns:
        For every local token the sum over all tokens up to and with it, 0 for dummies; in the
        dtype of `x` (int64 for integers and bool), half precision is added in float32.

    Raises:
        RefusedError: if the size at `dim` is not this rank's share of a declared sequence.
        PeerError: if another rank failed.
    """
    found: Tensor = torch.ops.lightning_cp.cumsum(x, _axis(x, dim))[0]
    return found


def global_softmax(
    x: Tensor,
    *,
    dim: int = -1,
    mask: Tensor | None = None,
    method: Literal["packed", "three_step"] = "packed",
) -> Tensor:
    """Softmax along the whole sequence, of which every rank holds a part.

    Args:
        x: scores of this rank's tokens at `dim`, any floating dtype; computed in float32 or wider.
        dim: the sequence dimension.
        mask: which tokens count, bool or numbers other than 0; its shape as in `sequence_sum`.
        method: "packed", one gather of pairs (largest score, sum of powers); "three_step", two
            all-reduces, a maximum and a sum. Equal up to rounding.

    Returns:
        The shape and dtype of `x`: this rank's part of weights that add up to 1 over the group; 0
        for dummies and hidden tokens, and everywhere if no token counts.

    Raises:
        RefusedError: for another method, if the size at `dim` is not this rank's share of a
            declared sequence, or the mask does not fit.
        PeerError: if another rank failed.
    """
    if method not in ("packed", "three_step"):
        raise RefusedError(f"method={method!r} is unknown; use packed or three_step")
    dim = _axis(x, dim)
    if mask is not None:
        x = torch.where(_aligned(mask, x, dim) != 0, x, -torch.inf)
    found: Tensor = torch.ops.lightning_cp.global_softmax(x, dim, method == "packed")[0]
    return found
