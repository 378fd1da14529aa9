"""Layouts that know the documents of a row: even in work and tokens, with little that travels.

`balanced` makes the layout, `layout_of` any layout by its name, `least_received` is a lower bound,
and `CostModel` predicts the time of a step.
"""

from lightning_cp.balance.bounds import least_received
from lightning_cp.balance.cost import CostModel
from lightning_cp.balance.layouts import DOCUMENT_LAYOUTS, Padding, balanced, layout_of, pieces_of
from lightning_cp.balance.masks import Chunked, Prefixed, work_of
from lightning_cp.balance.options import Balanced
from lightning_cp.balance.planner import plan
from lightning_cp.balance.problem import Loads, Piece, Problem, loads
from lightning_cp.balance.windows import gather_window
from lightning_cp.balance.work import Banded, Causal, Work

__all__ = [
    "DOCUMENT_LAYOUTS",
    "Balanced",
    "Banded",
    "Causal",
    "Chunked",
    "CostModel",
    "Loads",
    "Padding",
    "Piece",
    "Prefixed",
    "Problem",
    "Work",
    "balanced",
    "gather_window",
    "layout_of",
    "least_received",
    "loads",
    "pieces_of",
    "plan",
    "work_of",
]
