"""Plans: what is sent to whom in which round, and which tiles are computed when.

Pure Python on integers. `SCHEDULES` names the exchanges; `build_plan` makes the frozen, cached
plan of one rank.
"""

from lightning_cp.plan.allgather import AllGather
from lightning_cp.plan.base import Plan, Traffic
from lightning_cp.plan.build import SCHEDULES, PlanKey, build_plan
from lightning_cp.plan.direct import Direct
from lightning_cp.plan.group import GroupLoad, group_load
from lightning_cp.plan.held import Held
from lightning_cp.plan.memory import Memory
from lightning_cp.plan.ring import Ring
from lightning_cp.plan.rounds import Round, Tile, Transfer
from lightning_cp.plan.schedule import Schedule

__all__ = [
    "SCHEDULES",
    "AllGather",
    "Direct",
    "GroupLoad",
    "Held",
    "Memory",
    "Plan",
    "PlanKey",
    "Ring",
    "Round",
    "Schedule",
    "Tile",
    "Traffic",
    "Transfer",
    "build_plan",
    "group_load",
]
