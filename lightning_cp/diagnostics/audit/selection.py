"""Rules about taking some tokens, or moving them along the sequence.

Taking one token of features is pooling. Of integers it is not looked at: a batch may repeat in all
tokens of a row what belongs to the row.
"""

from types import NoneType

from lightning_cp.diagnostics.audit.call import Call, Finding

GATHER = "use lightning_cp.functional.gather_sequence before"
SHIFT = (
    "shift in the dataset, before the batch is cut, or use lightning_cp.functional.shift_labels "
    "for labels"
)


def element(call: Call) -> Finding | None:
    """`x[:, 0]` and `x[:, -1]`."""
    tensor, dim, index = call.tensor(), call.get("dim"), call.get("index")
    if tensor is None or type(index) is not int:
        return None
    share = call.tokens.at(tensor, dim)
    if not share or index not in (0, -1, share - 1) or not tensor.is_floating_point():
        return None
    return _taken("last" if index else "first", share)


def part(call: Call) -> Finding | None:
    """`x[:, 1:]`, `x[:, :-1]`, one token at an end, and a table of the model from its start on."""
    tensor, dim = call.tensor(), call.get("dim")
    start, stop, step = call.get("start"), call.get("end"), call.get("step")
    start = 0 if start is None else start
    if tensor is None or step != 1 or type(start) is not int or type(stop) not in (int, NoneType):
        return None
    share = call.tokens.at(tensor, dim)
    if not share:
        return _table(call, start, stop) if start == 0 else None
    stop = share if stop is None else stop
    held = range(share)[start:stop]
    if held in (range(1, share), range(share - 1)):
        return _shifted(f"a slice without the {'first' if held[0] else 'last'}", share)
    alone = held == range(1) or (len(held) == 1 and start == -1)
    if alone and tensor.is_floating_point():
        return _taken("last" if start else "first", share)
    return None


def split(call: Call) -> Finding | None:
    """The first or the last token split off."""
    tensor, sizes = call.tensor(), call.get("split_sizes")
    if tensor is None or not tensor.is_floating_point():
        return None
    share = call.tokens.at(tensor, call.get("dim"))
    if not share or len(sizes) != 2 or 1 not in sizes:
        return None
    return _taken("first" if sizes[0] == 1 else "last", share)


def reordered(call: Call) -> Finding | None:
    """`roll` and `flip` along the sequence."""
    tensor = call.tensor()
    for dim in call.get("dims") or ():
        share = 0 if tensor is None else call.tokens.at(tensor, dim)
        if share:
            return _shifted(f"torch.{call.name}", share)
    return None


def padded(call: Call) -> Finding | None:
    """A shift by padding: tokens fall off an end, or labels get one more."""
    tensor, pad = call.tensor(), call.get("pad")
    if tensor is None:
        return None
    is_labels = tensor.ndim == 2 and not tensor.is_floating_point()
    for place in range(len(pad) // 2):
        share = call.tokens.at(tensor, -1 - place)
        before, after = pad[2 * place : 2 * place + 2]
        if share and (min(before, after) < 0 or (is_labels and before + after == 1)):
            return _shifted(f"padding by {before} and {after} at the ends", share)
    return None


def iterated(call: Call) -> Finding | None:
    """A loop over the tokens, torch's own recurrent layers included."""
    tensor, dim = call.tensor(), call.get("dim")
    share = 0 if tensor is None else call.tokens.at(tensor, dim)
    if not share or call.tokens.is_width(share):
        return None
    return Finding(
        f"a recurrence or loop over the {share} tokens of this rank: every rank would start anew "
        f"at its first token",
        "use attention, or lightning_cp.functional.gather_sequence before and scatter_sequence "
        "after",
    )


def _taken(which: str, share: int) -> Finding:
    return Finding(
        f"the {which} of this rank's {share} tokens is taken out: every rank would take another "
        f"token of the sequence",
        f"{GATHER}, or lightning_cp.functional.sequence_sum with a mask made from positions",
    )


def _shifted(what: str, share: int) -> Finding:
    return Finding(
        f"{what} of this rank's {share} tokens, a shift along the sequence: tokens would be lost "
        f"or meet the wrong ones wherever the sequence is cut",
        SHIFT,
    )


def _table(call: Call, start: int, stop: object) -> Finding | None:
    tensor, dim = call.tensor(), call.get("dim")
    if tensor is None or not call.tokens.is_share(stop):
        return None
    assert isinstance(stop, int)  # invariant: a share is an int
    size = tensor.shape[dim]
    if type(size) is not int or size <= stop or not call.tokens.is_table(tensor, stop):
        return None
    return Finding(
        f"the first {stop} of {size} entries of a table, as many as this rank has tokens: every "
        f"rank would take those of the first tokens of the sequence",
        f"index the table with lightning_cp.functional.positions({stop}) or the batch's "
        f"position_ids",
    )
