"""From a whole batch to this rank's part of it."""

from lightning_cp.data.cut import Cut, cut
from lightning_cp.data.fields import Fields, find_fields

__all__ = ["Cut", "Fields", "cut", "find_fields"]
