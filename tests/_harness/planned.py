"""One attention call of a whole group, its plans, and any such call at random."""

from typing import NamedTuple

from hypothesis import strategies as st

from lightning_cp.layout import Layout
from lightning_cp.mask import Mask, rows_of
from lightning_cp.plan import SCHEDULES, Plan, build_plan
from tests._harness.simulate import Bools, Simulation, dense, layouts, masks, simulate

EXCHANGES = sorted(SCHEDULES)


class Case(NamedTuple):
    """One attention call of a whole group."""

    mask: Mask
    q_layout: Layout
    kv_layout: Layout

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries and keys, dummies included."""
        rows = len(self.mask.keys or rows_of(self.mask.documents) or (None, None))
        return rows, self.q_layout.length, self.kv_layout.length

    def dense(self) -> Bools:
        """Which query may see which key of which row."""
        return dense(self.mask, self.shape)

    def plans(self, exchange: str) -> list[Plan]:
        """The plan of every rank."""
        return [
            build_plan(self.q_layout, self.kv_layout, self.mask, rank=rank, exchange=exchange)
            for rank in range(self.q_layout.world)
        ]

    def simulate(self, exchange: str) -> Simulation:
        """All plans, run on positions."""
        return simulate(self.plans(exchange), self.q_layout, self.kv_layout)


@st.composite
def cases(draw: st.DrawFn, *, fewest: int = 1, most: int = 8) -> Case:
    """Any mask on any two layouts of `fewest` to `most` ranks, with up to 4 dummies."""
    mask, world = draw(masks()), draw(st.integers(fewest, most))
    dummies = st.integers(0, 4)
    q_layout = draw(layouts(mask.q_length + draw(dummies), world))
    if mask.q_length == mask.kv_length and draw(st.booleans()):
        return Case(mask, q_layout, q_layout)
    return Case(mask, q_layout, draw(layouts(mask.kv_length + draw(dummies), world)))
