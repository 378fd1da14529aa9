"""Tensors that a tensor-parallel group shares: for attention every rank takes its own heads."""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_cp.errors import RefusedError


def is_shared(*tensors: Tensor) -> bool:
    """Whether one of the tensors is a DTensor."""
    return any(isinstance(x, DTensor) for x in tensors)


def whole(x: Tensor) -> Tensor:
    """A DTensor put together, a collective call of its ranks unless each has all; others as is."""
    if not isinstance(x, DTensor):
        return x
    found: Tensor = x.full_tensor()
    return found


def own_heads(
    query: Tensor, key: Tensor, value: Tensor, *, where: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """This rank's heads, and what makes its output one of all ranks again.

    Keys and values that lie otherwise than the queries are moved first, by a collective call of
    the tensor-parallel group where they are not whole on every rank.

    Args:
        query: `[..., H, S, D]`, cut over heads or the batch, or whole on every rank.
        key: `[..., Hk, S, D]`.
        value: `[..., Hk, S, Dv]`.
        where: beginning of messages.

    Raises:
        RefusedError: if one is no DTensor, or the sequence or a channel is cut, or heads do not
            divide by the number of ranks.
    """
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        raise RefusedError(
            f"{where}: of query, key and value some are DTensors and some are not; take to_local() "
            f"of all of them (output layouts of the layers before: use_local_output=True)"
        )
    mesh, placements = query.device_mesh, query.placements
    heads = query.ndim - 3
    allowed = (Replicate(), *(Shard(dim) for dim in range(heads + 1)))
    if not all(placement in allowed for placement in placements):
        raise RefusedError(
            f"{where}: a query of {query.ndim} dimensions that is placed {list(placements)}: "
            f"attention takes tensors that are cut over heads (dimension {heads}) or the batch; "
            f"context parallelism cuts the sequence itself, so gather it before attention"
        )
    for number, placement in enumerate(placements):
        ranks = mesh.size(number)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if isinstance(placement, Shard) and x.shape[placement.dim] % ranks:
                what = "heads" if placement.dim == heads else "rows"
                raise RefusedError(
                    f"{where}: {x.shape[placement.dim]} {name} {what} do not divide by the {ranks} "
                    f"ranks that share them; use a tensor_parallel_size that divides them"
                )
    same = [x.redistribute(mesh, placements) for x in (query, key, value)]

    def together(out: Tensor) -> Tensor:
        return DTensor.from_local(out, mesh, placements, run_check=False)

    q, k, v = (x.to_local() for x in same)
    return (q, k, v), together
