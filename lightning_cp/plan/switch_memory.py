"""How many bytes a call holds that swaps heads for tokens: buffers, counted without running it."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_cp.plan.heads import Heads, uniform
from lightning_cp.plan.memory import Sizes, backward_peak, forward_peak
from lightning_cp.plan.rounds import Round
from lightning_cp.plan.switch import Row, Switch
from lightning_cp.spans import total


class SwitchMemory(NamedTuple):
    """What the buffers of a call depend on."""

    switch: Switch
    rounds: Sequence[Round]
    head_chunks: int
    half_grads: bool
    sizes: Sizes
    kept: bool = False

    def forward(self) -> int:
        """The most bytes at a time in a forward, all portions of heads one after the other."""
        rows, sizes = self.switch.rows(self.sizes, half_grads=self.half_grads), self.sizes
        results = self._results(Row(rows.results.q * sizes.heads))
        peak, home, portions, held = results, 0, self._portions(), 0
        for at, own in enumerate(portions):
            block = held + self.switch.whole(own, rows.inputs)
            held = block if self.kept else 0
            coming = self._messages(portions, at + 1, rows.inputs)
            arriving = self.switch.crossing(own, rows.inputs)[1]
            if not at:
                peak = max(peak, results + self._messages(portions, 0, rows.inputs))
            running = forward_peak(
                self.rounds, self._groups(own), self.switch.q_size, self._of(own)
            )
            peak = max(peak, results + home + arriving + block)
            peak = max(peak, results + home + block + coming + running)
            home = sum(self.switch.returning(own, rows.results))
            done = self.switch.whole(own, rows.results)
            peak = max(peak, results + held + coming + done + home)
        return peak

    def backward(self) -> int:
        """The most bytes at a time in a backward."""
        rows, sizes = self.switch.rows(self.sizes, half_grads=self.half_grads), self.sizes
        inputs = rows.saved if self.kept else rows.inputs.plus(rows.saved)
        shared = self.switch.shared(sizes.heads, sizes.kv_heads)
        key = sizes.batch * (sizes.head_dim + sizes.value_dim)
        held = Row(rows.grads.q, key * (sizes.wire if shared else sizes.itemsize))
        results = self._results(Row(held.q * sizes.heads, held.kv * sizes.kv_heads))
        wire = sizes.itemsize if self.half_grads else sizes.wire
        peak, home, portions = results, 0, self._portions()
        for at, own in enumerate(portions):
            block = self.switch.whole(own, inputs)
            coming = self._messages(portions, at + 1, inputs)
            arriving = self.switch.crossing(own, inputs)[1]
            if not at:
                peak = max(peak, results + self._messages(portions, 0, inputs))
            running = backward_peak(
                self.rounds,
                self._groups(own),
                (self.switch.q_size, self.switch.kv_size),
                self._of(own),
                wire=wire,
                wide=shared,
            )
            peak = max(peak, results + home + arriving + block)
            peak = max(peak, results + home + block + coming + running)
            home = sum(self.switch.returning(own, rows.grads))
            peak = max(peak, results + coming + self.switch.whole(own, held) + home)
        return peak

    def _portions(self) -> tuple[tuple[Heads, ...], ...]:
        return self.switch.portions(self.sizes.heads, self.sizes.kv_heads, self.head_chunks)

    def _messages(self, portions: Sequence[tuple[Heads, ...]], at: int, row: Row) -> int:
        """Sent and received buffers of a portion, 0 after the last."""
        return sum(self.switch.crossing(portions[at], row)) if at < len(portions) else 0

    def _results(self, row: Row) -> int:
        """Rows of all heads of the own tokens."""
        here = self.switch.index
        return total(self.switch.q[here]) * row.q + total(self.switch.kv[here]) * row.kv

    def _of(self, own: tuple[Heads, ...]) -> Sizes:
        heads, kv_heads = own[self.switch.index].counts
        return self.sizes._replace(heads=heads, kv_heads=kv_heads)

    def _groups(self, own: tuple[Heads, ...]) -> tuple[Sizes, ...]:
        """The heads of this rank as they are computed."""
        ratio = self.sizes.heads // self.sizes.kv_heads
        counts = [group.counts for group in uniform(own[self.switch.index], ratio)]
        return tuple(self.sizes._replace(heads=q, kv_heads=kv) for q, kv in counts)
