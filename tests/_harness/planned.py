"""One attention call of a whole group, its plans, and any such call at random."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from lightning_cp.layout import Layout
from lightning_cp.mask import Mask, rows_of
from lightning_cp.plan import SCHEDULES, Plan, Round, Schedule, Transfer, build_plan
from tests._harness.simulate import Bools, Simulation, dense, indices, layouts, masks, simulate

EXCHANGES = sorted(SCHEDULES)


class Case(NamedTuple):
    """One attention call of a whole group."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries and keys, dummies included."""
        rows = len(
            self.mask.keys or rows_of(self.mask.documents) or self.mask.prefix or (None, None)
        )
        return rows, self.q_layout.length, self.kv_layout.length

    def dense(self) -> Bools:
        """Which query may see which key of which row."""
        return dense(self.mask, self.shape)

    def plans(self, exchange: str | Schedule) -> list[Plan]:
        """The plan of every rank."""
        return [
            build_plan(self.q_layout, self.kv_layout, self.mask, rank=rank, exchange=exchange)
            for rank in range(self.q_layout.world)
        ]

    def simulate(self, exchange: str) -> Simulation:
        """All plans, run on positions."""
        return simulate(self.plans(exchange), self.q_layout, self.kv_layout)

    def parts(self, plans: Sequence[Plan]) -> Iterator[tuple["Case", list[Plan]]]:
        """The groups that compute the call, each for its heads: all ranks, or one of every block.

        Raises:
            AssertionError: if a swap does not bring a block its tokens in global order.
        """
        if plans[0].switch is None:
            yield self, list(plans)
            return
        size = len(plans[0].switch.members)
        whole = Case(self.mask, merged(self.q_layout, size), merged(self.kv_layout, size))
        for plan in plans:
            check_switch(self, whole, plan)
        for index in range(size):
            yield whole, [of_block(plan, size) for plan in plans[index::size]]


def merged(layout: Layout, size: int) -> Layout:
    """Neighbouring ranks as one, with its tokens in global order; written on positions."""
    held = []
    for first in range(0, layout.world, size):
        own = sorted(p for r in range(first, first + size) for p in layout.positions(r).tolist())
        held.append(tuple((p, p + 1) for p in own))
    return Layout(layout.length, tuple(held))


def check_switch(case: Case, whole: Case, plan: Plan) -> None:
    """Every member's rows are its tokens, in its local order."""
    switch = plan.switch
    assert switch is not None
    size = len(switch.members)
    first = plan.rank // size * size
    assert switch.members == tuple(range(first, first + size))
    assert switch.members[switch.index] == plan.rank
    for layout, block, held, local in (
        (case.q_layout, whole.q_layout, switch.q, plan.q_size),
        (case.kv_layout, whole.kv_layout, switch.kv, plan.kv_size),
    ):
        positions = block.positions(plan.rank // size)
        for member, rows in zip(switch.members, held, strict=True):
            assert positions[indices(rows)].tolist() == layout.positions(member).tolist()
        assert local == layout.size(plan.rank)


def of_block(plan: Plan, size: int) -> Plan:
    """The plan that blocks have in common with other blocks, as one of a group of blocks."""
    switch = plan.switch
    assert switch is not None

    def blocks(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        assert all(t.peer % size == plan.rank % size for t in transfers)
        return tuple(t._replace(peer=t.peer // size) for t in transfers)

    def of_blocks(step: Round) -> Round:
        return replace(
            step,
            sends=blocks(step.sends),
            receives=blocks(step.receives),
            returns=blocks(step.returns),
            collects=blocks(step.collects),
        )

    return replace(
        plan,
        rank=plan.rank // size,
        world=plan.world // size,
        q_size=switch.q_size,
        kv_size=switch.kv_size,
        rounds=tuple(map(of_blocks, plan.rounds)),
        switch=None,
    )


@st.composite
def cases(draw: st.DrawFn, *, fewest: int = 1, most: int = 8) -> Case:
    """Any mask on any two layouts of `fewest` to `most` ranks, with up to 4 dummies."""
    mask, world = draw(masks()), draw(st.integers(fewest, most))
    dummies = st.integers(0, 4)
    q_layout = draw(layouts(mask.q_length + draw(dummies), world))
    if mask.q_length == mask.kv_length and draw(st.booleans()):
        return Case(mask, q_layout, q_layout)
    return Case(mask, q_layout, draw(layouts(mask.kv_length + draw(dummies), world)))
