"""Plans: what is sent to whom in which round, and which tiles are computed when.

Pure Python on integers. `SCHEDULES` names the exchanges; `build_plan` makes the frozen, cached
plan of one rank.
"""

from lightning_cp.plan.base import Plan, Round, Tile, Traffic, Transfer
from lightning_cp.plan.build import SCHEDULES, build_plan

__all__ = ["SCHEDULES", "Plan", "Round", "Tile", "Traffic", "Transfer", "build_plan"]
