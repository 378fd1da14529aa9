"""Rules about statistics over the sequence: reductions, pooling, softmax, norms."""

from lightning_cp.diagnostics.audit.call import Call, Finding

INSTEAD = {
    "mean": "sequence_mean",
    "sum": "sequence_sum",
    "amax": "sequence_max",
    "max": "sequence_max",
    "softmax": "global_softmax",
    "safe_softmax": "global_softmax",
}
"""Functions of the package that do the same over the whole sequence."""


def reduced(call: Call) -> Finding | None:
    """A reduction over the sequence; one to a scalar is left to the comparison of losses."""
    tensor, dims = call.tensor(), call.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if tensor is None or not dims or len(dims) == tensor.ndim:
        return None
    return _over(call, dims)


def normalised(call: Call) -> Finding | None:
    """A softmax over the sequence, or over the keys of attention that is written out."""
    tensor, dim = call.tensor(), call.get("dim")
    if tensor is None or tensor.ndim < 2:
        return None
    queries, keys = tensor.shape[-2:]
    is_last = dim % tensor.ndim == tensor.ndim - 1
    # One column more is an attention sink.
    square = call.tokens.is_share(queries) and type(keys) is int and keys - queries in (0, 1)
    if is_last and square and tensor.ndim > 2 and not call.tokens.is_width(queries):
        return written_out(queries, keys)
    return _over(call, [dim])


def written_out(queries: int, keys: int) -> Finding:
    """What is said of attention without torch's function."""
    return Finding(
        f"scores of {queries} x {keys} tokens, as in attention written out with matmul and "
        f"softmax: a token would attend to this rank's {queries} tokens alone",
        "use torch.nn.functional.scaled_dot_product_attention or lightning_cp.attend",
    )


def batch_statistics(call: Call) -> Finding | None:
    """Batch norm in training, and instance norm, whose statistics are over tokens."""
    tensor = call.tensor()
    if tensor is None or tensor.ndim not in (2, 3) or call.get("training") is False:
        return None
    tokens, place = call.tokens, 0 if tensor.ndim == 2 else 2
    size = tensor.shape[place]
    for share, rows in tokens.rows.items() if type(size) is int else ():
        if (size == share and place == 2) or size in [share * row for row in rows]:
            return _statistics("batch", share)
    return None


def group_statistics(call: Call) -> Finding | None:
    """Group norm of `[B, C, S]`: statistics of a group are over its tokens too."""
    tensor = call.tensor()
    share = call.tokens.at(tensor, 2) if tensor is not None and tensor.ndim == 3 else 0
    return _statistics("group", share) if share else None


def layer_statistics(call: Call) -> Finding | None:
    """Layer norm over more than the last dimension."""
    tensor, shape = call.tensor(), call.get("normalized_shape")
    if tensor is None or len(shape) < 2:
        return None
    shares = [call.tokens.at(tensor, -1 - place) for place in range(len(shape))]
    return _statistics("layer", max(shares)) if any(shares) else None


def pooled(call: Call) -> Finding | None:
    """Pooling of `[B, C, S]`, which torch does as `[B, C, 1, S]`."""
    tensor, kernel = call.tensor(), call.get("kernel_size")
    if tensor is None or (kernel is not None and max(kernel) == 1):
        return None
    flat = tensor.ndim == 3 or (tensor.ndim == 4 and tensor.shape[2] == 1)
    return _over(call, [-1]) if flat else None


def _over(call: Call, dims: list[int]) -> Finding | None:
    tensor = call.tensor()
    if tensor is None:
        return None
    share = max(call.tokens.at(tensor, dim) for dim in dims)
    if not share:
        return None
    instead = INSTEAD.get(call.name, "gather_sequence")
    return Finding(
        f"torch.{call.name} over this rank's {share} tokens: every rank would get that of its own "
        f"part of the sequence",
        f"use lightning_cp.functional.{instead}",
    )


def _statistics(kind: str, share: int) -> Finding:
    return Finding(
        f"{kind} statistics over this rank's {share} tokens: every rank would normalise by those "
        f"of its own part of the sequence",
        "use a norm over the features of a token (LayerNorm, RMSNorm)"
        + (", SyncBatchNorm, or the norm in eval mode" if kind == "batch" else ""),
    )
