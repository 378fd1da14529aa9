"""Plans: what is sent to whom in which round, and which tiles are computed when.

Pure Python on integers. `SCHEDULES` names the exchanges; `build_plan` makes the frozen, cached
plan of one rank.
"""

from lightning_cp.plan.allgather import AllGather
from lightning_cp.plan.base import Plan, Traffic
from lightning_cp.plan.build import SCHEDULES, Exchange, PlanKey, build_plan, schedule_of
from lightning_cp.plan.choose import EXCHANGES, Choice, known_calls, quickest
from lightning_cp.plan.direct import Direct
from lightning_cp.plan.group import GroupLoad, group_load
from lightning_cp.plan.heads import Heads, uniform
from lightning_cp.plan.held import Held
from lightning_cp.plan.hybrid import Hybrid
from lightning_cp.plan.memory import Memory, Sizes
from lightning_cp.plan.price import Call, seconds
from lightning_cp.plan.replicated import Replicated
from lightning_cp.plan.ring import Ring
from lightning_cp.plan.rounds import Round, Tile, Transfer
from lightning_cp.plan.schedule import Schedule
from lightning_cp.plan.switch import Switch
from lightning_cp.plan.ulysses import Ulysses

__all__ = [
    "EXCHANGES",
    "SCHEDULES",
    "AllGather",
    "Call",
    "Choice",
    "Direct",
    "Exchange",
    "GroupLoad",
    "Heads",
    "Held",
    "Hybrid",
    "Memory",
    "Plan",
    "PlanKey",
    "Replicated",
    "Ring",
    "Round",
    "Schedule",
    "Sizes",
    "Switch",
    "Tile",
    "Traffic",
    "Transfer",
    "Ulysses",
    "build_plan",
    "group_load",
    "known_calls",
    "quickest",
    "schedule_of",
    "seconds",
    "uniform",
]
