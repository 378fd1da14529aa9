"""What a model needs on a rank, by a stated rule, and whether cutting a row pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_cp.balance import CostModel, Loads, Piece, Problem, loads
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.layout import Layout
from lightning_cp.mask import Mask
from lightning_cp.plan import Call, build_plan
from lightning_cp.plan.price import cost_of, memory

SAVES = 0.98
"""What cutting has to take at most of the time that whole documents take, to pay."""

RULE = (
    "activations that wait for the backward: in each layer of every token inputs and outputs of "
    "two norms, q, k, v and the attention output, and both sides of an MLP of 4 x hidden, "
    "without recomputation"
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a transformer.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of a head.
        layers: their number.
        hidden: width between layers.
        dtype: a name of `DTYPES`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    hidden: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def call(self) -> Call:
        """An attention call of one row."""
        return Call(self.heads, self.kv_heads, self.head_dim, self.head_dim, self.itemsize)

    @property
    def cost(self) -> CostModel:
        """The default constants, scaled to these sizes."""
        found = cost_of(self.call)
        width = self.hidden / (self.heads * self.head_dim)
        return replace(found, token=found.token * width**2)

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    def activations(self, tokens: int) -> int:
        """Bytes that a rank with so many tokens keeps for the backward; see `RULE`."""
        norms_and_mlp, attention = 12 * self.hidden, 2 * self.heads * self.head_dim
        return self.layers * tokens * (self.itemsize * (norms_and_mlp + attention) + self.key_bytes)


def attention_memory(layout: Layout, mask: Mask, model: Model) -> list[int]:
    """Peak bytes of one attention call on every rank, keys of others included, with "direct"."""
    plans = [
        build_plan.__wrapped__(layout, layout, mask, rank=rank, exchange="direct")
        for rank in range(layout.world)
    ]
    return [max(memory(plan, model.call)) for plan in plans]


class Verdict(NamedTuple):
    """Whether cutting pays.

    Attributes:
        layout: the quickest one.
        seconds: of its slowest rank, in a layer.
        whole_seconds: of the slowest rank where every document is whole on one rank.
        whole_tokens: most tokens of a rank then.
        longest: tokens of the longest document.
    """

    layout: str
    seconds: float
    whole_seconds: float
    whole_tokens: int
    longest: int

    @property
    def pays(self) -> bool:
        """Whether it takes less time."""
        return self.seconds <= SAVES * self.whole_seconds


def verdict(problem: Problem, cost: CostModel, layouts: dict[str, Loads]) -> Verdict:
    """The quickest layout beside whole documents, dealt out to the same ranks by their time."""
    whole = loads(problem, dealt(problem, cost))
    name = min(layouts, key=lambda layout: cost.step(layouts[layout]))
    return Verdict(
        name,
        cost.step(layouts[name]),
        cost.step(whole),
        max(whole.tokens),
        max(problem.lengths),
    )


def dealt(problem: Problem, cost: CostModel) -> Sequence[Sequence[Piece]]:
    """Whole documents, the longest first, each to the rank that is done first: no keys travel."""
    held: list[list[Piece]] = [[] for _ in problem.shares]
    busy = [0.0] * problem.world
    for _, doc, _, length in reversed(problem.rests()):
        rank = min(range(problem.world), key=lambda r: (busy[r], r))
        held[rank].append(Piece(doc, 0, length))
        busy[rank] += cost.pair * problem.works[doc].before(length, length) + cost.token * length
    return held
