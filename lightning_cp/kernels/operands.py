"""What a call of attention takes: shapes, dtypes and ranges, checked before anything is sent."""

from torch import Tensor

from lightning_cp.errors import RefusedError
from lightning_cp.kernels.scores import PerHead


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that are no queries, keys and values of one call.

    Raises:
        RefusedError: if shapes or dtypes do not fit.
    """
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


def check_terms(q: Tensor, learned: PerHead, softcap: float, dropout_p: float) -> None:
    """Refuse numbers and tensors that cannot change the scores of queries `[B, H, S, D]`.

    Raises:
        RefusedError: if one is out of range, or has another shape or dtype.
    """
    for name, x in (("sinks", learned.sinks), ("alibi_slopes", learned.slopes)):
        if x is not None and (x.shape != q.shape[1:2] or not x.is_floating_point()):
            raise RefusedError(
                f"{name} must be a floating-point tensor [H] with one number for each of the "
                f"{q.shape[1]} query heads; got {tuple(x.shape)} {x.dtype}"
            )
    table = learned.table
    if table is not None and (
        table.ndim != 2
        or table.shape[0] != q.shape[1]
        or table.shape[1] % 2 == 0
        or not table.is_floating_point()
    ):
        raise RefusedError(
            f"relative_bias must be a floating-point tensor [H, N] with a row for each of the "
            f"{q.shape[1]} query heads and an odd number of distances, 0 in the middle; got "
            f"{tuple(table.shape)} {table.dtype}"
        )
    if not softcap >= 0:
        raise RefusedError(f"softcap={softcap} must be greater than 0, or None for no bound")
    if not 0 <= dropout_p <= 1:
        raise RefusedError(f"dropout_p={dropout_p} is no probability; pass 0 to 1")
