"""Rules about what lets tokens see their neighbours or all others, attention aside."""

from lightning_cp.diagnostics.audit.call import Call, Finding
from lightning_cp.diagnostics.audit.reductions import written_out

HALO = (
    "use lightning_cp.functional.gather_sequence before and scatter_sequence after, or leave the "
    "layer out"
)


def convolved(call: Call) -> Finding | None:
    """A convolution of `[B, C, S]` with a kernel above 1, padded before or by itself."""
    tensor, weight, dilation = call.tensor(), call.tensor(1), call.get("dilation")
    if tensor is None or weight is None or tensor.ndim != 3 or weight.shape[2] == 1:
        return None
    rows, channels, size = tensor.shape
    reach = (weight.shape[2] - 1) * dilation[0]
    for share, batches in call.tokens.rows.items():
        fits = type(size) is int and share <= size <= share + reach
        is_features = channels == 1 and call.tokens.is_width(share)
        if fits and not is_features and any(rows % batch == 0 for batch in batches):
            return Finding(
                f"a convolution with kernel size {weight.shape[2]} over this rank's {share} "
                f"tokens: it would see padding wherever the sequence is cut",
                HALO,
            )
    return None


def windows(call: Call) -> Finding | None:
    """`unfold` along the sequence."""
    tensor, size = call.tensor(), call.get("size")
    share = 0 if tensor is None or size == 1 else call.tokens.at(tensor, call.get("dimension"))
    if not share:
        return None
    return Finding(
        f"windows of {size} over this rank's {share} tokens: they would end wherever the sequence "
        f"is cut",
        HALO,
    )


def transformed(call: Call) -> Finding | None:
    """A Fourier transform along the sequence."""
    tensor, dims = call.tensor(), call.get("dim")
    share = 0 if tensor is None else max(call.tokens.at(tensor, dim) for dim in dims)
    if not share:
        return None
    return Finding(
        f"a Fourier transform over this rank's {share} tokens: it is not that of the sequence",
        HALO,
    )


def recurrent(call: Call) -> Finding | None:
    """A recurrent layer in one operator: `[S, B, C]`, or `[B, S, C]` if it says so."""
    tensor = call.tensor()
    if tensor is None or tensor.ndim != 3:
        return None
    # The CPU's operator is told of the caller's order and gets tokens first all the same.
    batch_first = call.get("batch_first") and call.name != "mkldnn_rnn_layer"
    rows, share = tensor.shape[:2] if batch_first else (tensor.shape[1], tensor.shape[0])
    if not call.tokens.is_share(share) or rows not in call.tokens.rows[share]:
        return None
    return Finding(
        f"a recurrent layer over this rank's {share} tokens: every rank would start anew at its "
        f"first token",
        HALO,
    )


def products(call: Call) -> Finding | None:
    """Products that pair tokens with tokens, or add over tokens."""
    first = 0 if call.name == "bmm" else 1
    left, right = call.tensor(first), call.tensor(first + 1)
    if left is None or right is None:
        return None
    (count, queries, inner), keys = left.shape, right.shape[2]
    tokens = call.tokens
    if any(type(size) is not int for size in (count, queries, inner, keys)):
        return None
    differentiated = left.requires_grad or right.requires_grad
    if tokens.is_share(queries) and tokens.is_share(keys) and inner != queries:
        known = not tokens.is_width(queries) or differentiated
        return written_out(queries, keys) if known and _of_rows(call, queries, count) else None
    alone = left.shape.count(inner) == 1 == right.shape.count(inner)
    if not tokens.is_share(inner) or not alone or tokens.is_width(inner):
        return None
    if not _of_rows(call, inner, count):
        return None
    return Finding(
        f"a matrix product that adds over this rank's {inner} tokens: every rank would get the sum "
        f"over its own part of the sequence",
        "use attention, or lightning_cp.functional.sequence_sum",
    )


def triangle(call: Call) -> Finding | None:
    """`tril` and `triu` of scores; masks are judged where attention takes them."""
    tensor = call.tensor()
    if tensor is None or tensor.ndim < 3 or not tensor.requires_grad:
        return None
    queries, keys = tensor.shape[-2:]
    if not (call.tokens.is_share(queries) and call.tokens.is_share(keys) and queries == keys):
        return None
    return None if call.tokens.is_width(queries) else written_out(queries, keys)


def _of_rows(call: Call, share: int, count: int) -> bool:
    """Whether `count` matrices may be one or several per row, and not one or several per token."""
    rows = call.tokens.rows[share]
    return any(count % row == 0 and count % (row * share) != 0 for row in rows)
