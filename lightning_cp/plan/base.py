"""The plan value: rounds of transfers and tiles, with exact counts of work, bytes and memory."""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_cp.plan.memory import Memory, Sizes, backward_peak, forward_peak, state_size
from lightning_cp.plan.rounds import Round
from lightning_cp.spans import Spans


class Traffic(NamedTuple):
    """Bytes of one attention call on one rank. Backward fetches keys and values again."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does in one attention call: the same for every layer with this mask.

    Attributes:
        rank: rank within the context-parallel group of `world` ranks.
        exchange: name of the schedule.
        q_size: local queries.
        kv_size: local keys.
        rounds: round 0 works on the own shard; the others on received keys and values.
        head_chunks: all rounds are run for one group of heads after the other, as many groups as
            this, or as there are key heads.
        queries: global positions of the local queries, in order.
    """

    rank: int
    world: int
    exchange: str
    q_size: int
    kv_size: int
    rounds: tuple[Round, ...]
    head_chunks: int = 1
    queries: Spans = ()

    def work(self, batch: int = 1) -> int:
        """Score elements per head that this rank computes for `batch` rows."""
        return sum(
            tile.pairs * (batch if tile.row is None else 1)
            for step in self.rounds
            for tile in step.tiles
        )

    def traffic(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        itemsize: int,
        value_dim: int | None = None,
        batch: int = 1,
    ) -> Traffic:
        """Exact bytes that this rank sends and receives.

        Args:
            kv_heads: key and value heads; they are never expanded to the query heads.
            head_dim: size of a key.
            itemsize: bytes of one element of keys and values. Gradients travel in at least four.
            value_dim: size of a value, `head_dim` where not given.
            batch: rows of the batch.
        """
        row = batch * kv_heads * (head_dim + (head_dim if value_dim is None else value_dim))
        sent = row * itemsize * sum(t.size for step in self.rounds for t in step.sends)
        received = row * itemsize * sum(t.size for step in self.rounds for t in step.receives)
        grad = row * max(itemsize, 4)
        returned = grad * sum(t.size for step in self.rounds for t in step.returns)
        collected = grad * sum(t.size for step in self.rounds for t in step.collects)
        return Traffic(sent, received, sent + returned, received + collected)

    def memory(
        self,
        *,
        heads: int,
        head_dim: int,
        itemsize: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        batch: int = 1,
    ) -> Memory:
        """Peak bytes that one attention call on this rank holds besides its inputs.

        Results, running sums, messages, buffers, and the results of one tile of a fused kernel
        count; what a kernel needs inside does not.

        Args:
            heads: query heads.
            head_dim: size of a key.
            itemsize: bytes of one element; running sums and gradients on their way take at least
                four, sums of floats over more than eight rounds eight.
            kv_heads: key and value heads, `heads` where not given.
            value_dim: size of a value, `head_dim` where not given.
            batch: rows of the batch.
        """
        sizes = Sizes(
            batch,
            heads,
            heads if kv_heads is None else kv_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            itemsize,
            state_size(itemsize, len(self.rounds)),
        )
        groups = sizes.groups(self.head_chunks if len(self.rounds) > 1 else 1)
        return Memory(
            forward_peak(self.rounds, groups, self.q_size, sizes),
            backward_peak(self.rounds, groups, (self.q_size, self.kv_size), sizes),
        )
