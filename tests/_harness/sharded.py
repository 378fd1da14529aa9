"""Runs with sharded parameters: their cases and options, and a module with tied parameters."""

from dataclasses import replace
from typing import Any

from tests._harness.models import Case, LanguageModel

DOUBLE = Case(precision="64-true")
MANUAL = replace(DOUBLE, optimisation="manual")
SHARDED = {"zero_stage": 3}


class Tied(LanguageModel):
    """Head and embedding are one; so are layers of the two blocks."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.net.head.weight = self.net.tokens.weight
        blocks: Any = self.net.blocks
        blocks[1].attention.q.weight = blocks[0].attention.q.weight
