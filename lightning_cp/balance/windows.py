"""In which window to gather the parameters of the next block, by predicted times."""

from lightning_cp.balance.cost import CostModel

WIDTH = 4096
"""Width of the layer that the defaults of `CostModel` are for."""


def gather_window(
    *,
    tokens: int,
    pairs: int,
    width: int,
    parameters: int,
    itemsize: int,
    ranks: int,
    cp: int,
    cost: CostModel | None = None,
) -> str:
    """The window of `lightning_cp.gathers.Gathers` that a forward of a block is fastest in.

    "early" where attention hides its own traffic and the gather; else "after_attention" where the
    linear layers hide the gather; else torch's own order, "fsdp". All arguments are equal on all
    ranks, and so is the answer.

    Args:
        tokens: of all rows of a micro-batch together.
        pairs: visible (query, key) pairs of them, for one head.
        width: heads times head size.
        parameters: elements of a block.
        itemsize: bytes of an element of gathered parameters and of keys.
        ranks: how many hold a part of the parameters.
        cp: how many share a row.
        cost: speed and bandwidth, the defaults where None.
    """
    cost = cost or CostModel()
    rate = 14 * WIDTH / cost.pair  # 4 per pair and channel in the forward, 10 in the backward
    attention = 4 * width * pairs / cp / rate
    linear = 2 * parameters * tokens / cp / rate
    keys = 2 * width * itemsize * tokens * (cp - 1) / cp / cost.bandwidth
    gather = parameters * itemsize * (ranks - 1) / ranks / cost.bandwidth
    if keys + gather <= attention:
        return "early"
    return "after_attention" if gather <= linear else "fsdp"
