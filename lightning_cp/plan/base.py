"""The plan value: rounds of transfers and tiles, with exact counts of work, bytes and memory."""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_cp.plan.memory import Memory, Sizes, backward_peak, forward_peak, state_size
from lightning_cp.plan.rounds import Round
from lightning_cp.plan.switch import Switch
from lightning_cp.plan.switch_memory import SwitchMemory
from lightning_cp.spans import Spans


class Traffic(NamedTuple):
    """Bytes of one attention call on one rank. A backward fetches what was not kept again."""

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
        queries: global positions of the queries of the rounds, in order.
        half_grads: gradients of keys and values travel in the dtype of the keys.
        switch: how heads are swapped for tokens before and after the rounds, which then work on
            the tokens of a block of ranks; None where they are not.
    """

    rank: int
    world: int
    exchange: str
    q_size: int
    kv_size: int
    rounds: tuple[Round, ...]
    head_chunks: int = 1
    queries: Spans = ()
    half_grads: bool = False
    switch: Switch | None = None

    def rejects(self, heads: int, *, dropout: bool = False) -> str | None:
        """Why a call with so many query heads cannot be run, and the way out, or None."""
        return None if self.switch is None else self.switch.rejects(heads, dropout=dropout)

    def own_heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Query and key heads that this rank computes, of those of a call."""
        if self.switch is None:
            return heads, kv_heads
        return self.switch.shares(heads, kv_heads)[self.switch.index].counts

    def work(self, batch: int = 1) -> int:
        """Score elements for `batch` rows of each of `own_heads`."""
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
        heads: int | None = None,
        kept: bool = False,
    ) -> Traffic:
        """Exact bytes that this rank sends and receives.

        Args:
            kv_heads: key and value heads; they are never expanded to the query heads.
            head_dim: size of a key.
            itemsize: bytes of one element of keys and values. Gradients on their way take at least
                four, but for `half_grads`.
            value_dim: size of a value, `head_dim` where not given.
            batch: rows of the batch.
            heads: query heads, `kv_heads` where not given; they count where heads are swapped for
                tokens.
            kept: the forward keeps what heads were swapped for, where `Switch.keeps` it.
        """
        sizes = self._sizes(batch, heads or kv_heads, kv_heads, head_dim, value_dim, itemsize)
        row = batch * self.own_heads(sizes.heads, kv_heads)[1] * (head_dim + sizes.value_dim)
        sent = row * itemsize * sum(t.size for step in self.rounds for t in step.sends)
        received = row * itemsize * sum(t.size for step in self.rounds for t in step.receives)
        grad = row * (itemsize if self.half_grads else sizes.wire)
        returned = grad * sum(t.size for step in self.rounds for t in step.returns)
        collected = grad * sum(t.size for step in self.rounds for t in step.collects)
        (out, into), (out_again, into_again) = self._swapped(sizes, kept=kept)
        return Traffic(
            sent + out,
            received + into,
            sent + returned + out_again,
            received + collected + into_again,
        )

    def _sizes(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        itemsize: int,
    ) -> Sizes:
        value = head_dim if value_dim is None else value_dim
        state = state_size(itemsize, len(self.rounds))
        return Sizes(batch, heads, kv_heads, head_dim, value, itemsize, state)

    def _swapped(self, sizes: Sizes, *, kept: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes that swaps send and receive, in a forward and in a backward."""
        if self.switch is None:
            return (0, 0), (0, 0)
        own = self.switch.shares(sizes.heads, sizes.kv_heads)
        rows = self.switch.rows(sizes, half_grads=self.half_grads)
        inputs, saved = (self.switch.crossing(own, row) for row in (rows.inputs, rows.saved))
        results, grads = (self.switch.returning(own, row) for row in (rows.results, rows.grads))
        again = (0, 0) if kept and self.switch.keeps(sizes.heads, sizes.kv_heads) else inputs
        return (
            (inputs[0] + results[0], inputs[1] + results[1]),
            (again[0] + saved[0] + grads[0], again[1] + saved[1] + grads[1]),
        )

    def memory(
        self,
        *,
        heads: int,
        head_dim: int,
        itemsize: int,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        batch: int = 1,
        kept: bool = False,
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
            kept: the forward keeps what heads were swapped for, where `Switch.keeps` it, in place
                of its inputs; the backward gets that as an input.
        """
        sizes = self._sizes(batch, heads, kv_heads or heads, head_dim, value_dim, itemsize)
        if self.switch is not None:
            kept = kept and self.switch.keeps(sizes.heads, sizes.kv_heads)
            call = self.rounds, self.head_chunks, self.half_grads, sizes, kept
            found = SwitchMemory(self.switch, *call)
            return Memory(found.forward(), found.backward())
        groups = sizes.groups(self.head_chunks if len(self.rounds) > 1 else 1)
        wire = itemsize if self.half_grads else sizes.wire
        return Memory(
            forward_peak(self.rounds, groups, self.q_size, sizes),
            backward_peak(self.rounds, groups, (self.q_size, self.kv_size), sizes, wire=wire),
        )
