"""Norms of gradients, clipping, and sums over ranks, where gradients may be in parts.

Each element of a parameter counts once, wherever its parts are: ranks with different parts add
theirs up, ranks with equal ones do not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_cp.errors import NonFiniteGradientError


def grad_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of the gradients of all parameters together, as one device would find it.

    A collective call where parameters are sharded: every rank passes the same parameters.

    Args:
        parameters: those without a gradient do not count.
        norm_type: the exponent, at least 1; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise where the norm is infinite or NaN.

    Returns:
        A tensor without dimensions, equal on all ranks; float64 where a gradient is, else float32.

    Raises:
        NonFiniteGradientError: on every rank alike, where asked for.
    """
    found = [_summed(x.grad) for x in parameters if x.grad is not None]
    norm = _norm(found, float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteGradientError(
            f"the norm of the gradients is {float(norm)}, and error_if_nonfinite=True does not let "
            f"it pass; look for the first loss that is not finite, lower the learning rate, or use "
            f"error_if_nonfinite=False"
        )
    return norm


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients together so that their norm is at most `max_norm`, in place.

    A collective call where parameters are sharded; see `grad_norm`.

    Returns:
        The norm before.

    Raises:
        NonFiniteGradientError: on every rank alike, where asked for; nothing is scaled then.
    """
    given = list(parameters)
    norm = grad_norm(given, norm_type, error_if_nonfinite=error_if_nonfinite)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in _locals(given):
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def clip_grad_value(parameters: Iterable[Tensor], value: float) -> None:
    """Cut every element of the gradients to `[-value, value]`, in place; no rank needs another."""
    for local in _locals(parameters):
        local.clamp_(-value, value)


def average(parameters: Sequence[nn.Parameter], *, group: Any) -> None:
    """Average whole gradients of whole parameters over a group, in place; a collective call.

    A gradient that is equal on all ranks stays as it is, so what is averaged may be added to and
    averaged again.

    Args:
        parameters: the same on every rank, of any dtypes; a rank without a gradient adds zeros.
        group: process group of the ranks.
    """
    for x in parameters:
        if x.grad is None:
            x.grad = torch.zeros_like(x)
    if parameters:
        wide = torch.float64 if any(x.dtype == torch.float64 for x in parameters) else torch.float32
        packed = torch.cat([x.grad.flatten().to(wide) for x in parameters if x.grad is not None])
        dist.all_reduce(packed, group=group)
        packed /= dist.get_world_size(group)
        for x, mean in zip(parameters, packed.split([x.numel() for x in parameters]), strict=True):
            if x.grad is not None:
                x.grad.copy_(mean.view_as(x))


def _summed(grad: Tensor) -> Tensor:
    """A gradient of which no rank holds only a summand."""
    if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
        kept = [Replicate() if isinstance(p, Partial) else p for p in grad.placements]
        return grad.redistribute(placements=kept)
    return grad


def _locals(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = []
    for x in parameters:
        if x.grad is not None:
            x.grad = _summed(x.grad)
            grad = x.grad.detach()
            found.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    return found


def _norm(grads: list[Tensor], exponent: float) -> Tensor:
    """Powers are added up first within a rank, then between the ranks that share a parameter."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in grads) else torch.float32
    largest = exponent == float("inf")
    shared: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        value = _power(grad, exponent, wide)
        shared.setdefault(_sharing(grad), []).append(value)
    sums = []
    for groups, values in shared.items():
        device = values[0].device
        stacked = torch.stack([x.to(device) for x in values])
        total = stacked.amax() if largest else stacked.sum()
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        sums.append(total)
    if not sums:
        return torch.zeros((), dtype=wide)
    together = torch.stack([x.to(sums[0].device) for x in sums])
    return together.amax() if largest else together.sum() ** (1 / exponent)


def _power(grad: Tensor, exponent: float, dtype: torch.dtype) -> Tensor:
    """This rank's summand, where the ranks that share the gradient can add it up."""
    sharded = isinstance(grad, DTensor)
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    device = torch.device(grad.device_mesh.device_type) if isinstance(grad, DTensor) else None
    if not local.numel():
        value = torch.zeros((), dtype=dtype, device=local.device)
    else:
        value = torch.linalg.vector_norm(local.detach(), exponent, dtype=dtype)
        value = value if exponent == float("inf") else value**exponent
    moved = sharded and device is not None and value.device.type != device.type
    return value.to(device) if moved else value


def _sharing(grad: Tensor) -> tuple[Any, ...]:
    """The groups of ranks that hold different parts of a gradient."""
    if not isinstance(grad, DTensor):
        return ()
    return tuple(
        grad.device_mesh.get_group(number)
        for number, placement in enumerate(grad.placements)
        if not placement.is_replicate()
    )
