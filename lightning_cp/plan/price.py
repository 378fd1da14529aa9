"""What a plan is predicted to take: its rounds one after the other, each fetched one ahead."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_cp.balance.cost import CostModel
from lightning_cp.plan.base import Plan
from lightning_cp.plan.memory import Memory
from lightning_cp.plan.rounds import Round, Transfer

FORWARD = 2 / 7
"""Part of the computing of a call that its forward does: 2 of 7 matrix products."""

SWAPS = 2
"""Messages to each member of a block in a pass that swaps heads for tokens: there and back."""


class Call(NamedTuple):
    """Sizes of an attention call but for its tokens.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of a key.
        value_dim: size of a value.
        itemsize: bytes of an element.
        batch: rows of the batch.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    batch: int = 1


WIDE = Call(32, 8, 128, 128, 2)
"""Of the model that the defaults of `CostModel` are for."""


def cost_of(call: Call) -> CostModel:
    """The default constants for a model with such calls, in place of that of `WIDE`.

    Pairs cost in proportion to heads and their sizes, tokens to the square of the model's width,
    which is taken to be that of all query heads. What a dtype makes quicker is not in it.
    """
    standard = CostModel()
    width = call.heads * call.head_dim / (WIDE.heads * WIDE.head_dim)
    pair = call.heads * (call.head_dim + call.value_dim)
    key = call.kv_heads * (call.head_dim + call.value_dim) * call.itemsize
    return CostModel(
        pair=standard.pair * pair / (WIDE.heads * (WIDE.head_dim + WIDE.value_dim)),
        token=standard.token * width**2,
        key_bytes=standard.key_bytes
        * key
        / (WIDE.kv_heads * (WIDE.head_dim + WIDE.value_dim) * WIDE.itemsize),
    )


def seconds(plan: Plan, call: Call, cost: CostModel) -> float:
    """Seconds of a layer on the rank of a plan: an attention call there and back, and its tokens.

    Messages of a round travel while the round before is computed, group of heads after group of
    heads. A link is as busy as the direction in which more travels.

    Args:
        plan: of the rank; its counts of bytes, pairs and messages are what is priced.
        call: sizes of the call.
        cost: constants for all heads of such a call.
    """
    heads, kv_heads = plan.own_heads(call.heads, call.kv_heads)
    swaps = len(plan.switch.others) if plan.switch is not None else 0
    groups = max(1, min(plan.head_chunks, kv_heads)) if swaps or len(plan.rounds) > 1 else 1
    scale = cost.pair * heads / call.heads / groups
    computing = [scale * _pairs(step, call.batch, cost.tile) for step in plan.rounds]
    traffic = plan.traffic(**call._asdict(), kept=True)
    moved = [max(_rows(step.sends), _rows(step.receives)) for step in plan.rounds]
    there = max(traffic.forward_sent, traffic.forward_received)
    back = max(traffic.backward_sent, traffic.backward_received)
    total = cost.token * plan.q_size * call.batch
    for part, size, backward in ((FORWARD, there, False), (1 - FORWARD, back, True)):
        messages = [_messages(step, backward=backward) for step in plan.rounds]
        messages[0] += swaps * SWAPS
        links = [
            wait / groups / cost.bandwidth + cost.latency * count
            for wait, count in zip(_by_round(moved, size), messages, strict=True)
        ]
        stages = [(part * x, link) for x, link in zip(computing, links, strict=True)]
        total += _pipelined(stages * groups)
    return total


def memory(plan: Plan, call: Call) -> Memory:
    """Peak bytes of a call, whatever is kept; see `Plan.memory`."""
    peaks = [plan.memory(**call._asdict(), kept=kept) for kept in {False, plan.switch is not None}]
    return Memory(*map(max, zip(*peaks, strict=True)))


def _pairs(step: Round, batch: int, tile_rows: float) -> float:
    """Visible pairs, and what tiles cost as if they had more queries."""
    return sum(
        (tile.pairs + tile_rows * tile.pairs / (tile.q[1] - tile.q[0]))
        * (batch if tile.row is None else 1)
        for tile in step.tiles
    )


def _by_round(moved: list[int], size: int) -> Iterator[float]:
    """Bytes of a pass by round, in proportion to keys that travel; without any, before the first.

    What travels in a plan without keys that do are heads for tokens; nothing hides that.
    """
    total = sum(moved)
    for at, own in enumerate(moved):
        yield size * own / total if total else (0.0 if at else float(size))


def _rows(transfers: Iterable[Transfer]) -> int:
    return sum(transfer.size for transfer in transfers)


def _messages(step: Round, *, backward: bool) -> int:
    there = max(len(step.sends), len(step.receives))
    return there + (max(len(step.returns), len(step.collects)) if backward else 0)


def _pipelined(stages: Iterable[tuple[float, float]]) -> float:
    """Seconds of stages whose messages start to travel when the stage before is computed."""
    arrived = began = done = 0.0
    for compute, link in stages:
        arrived = max(arrived, began) + link
        began = max(done, arrived)
        done = began + compute
    return done
