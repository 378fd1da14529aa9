"""Lengths of documents from a file, and what every layout gives the ranks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_cp.balance import (
    DOCUMENT_LAYOUTS,
    Balanced,
    Causal,
    CostModel,
    Loads,
    Piece,
    Problem,
    Work,
    layout_of,
    least_received,
    loads,
    pieces_of,
)
from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS

NAMES = (*sorted(LAYOUTS), *reversed(DOCUMENT_LAYOUTS))
"""The layouts that are compared, in the order in which they are shown."""


def lengths_of(file: Path) -> tuple[int, ...]:
    """Lengths from a file: a JSON list of numbers, or numbers with spaces or commas between them.

    Raises:
        ConfigError: if there is no such file, or it holds anything else.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--lengths {file} cannot be read: {error}; "
            f"choose a file with the number of tokens of every document"
        ) from error
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    lengths = tuple(int(part) for part in parts if part.isdecimal())
    if not sum(lengths) or len(lengths) != len(parts):
        raise ConfigError(
            f"--lengths {file} must hold numbers of tokens, one for every document of a row, with "
            f"spaces, commas or line ends between them"
        )
    return lengths


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        lengths: tokens of every document, in the order of the row.
        ranks: of the group.
        options: of the balanced layout.
        work: what attention costs.
        key_bytes: bytes of a key and its value in one layer.
        cost: predicts times.
    """

    lengths: tuple[int, ...]
    ranks: int
    options: Balanced
    work: Work
    key_bytes: int
    cost: CostModel

    @property
    def problem(self) -> Problem:
        """The row and the ranks."""
        caps = (self.options.work_cap, self.options.token_cap)
        return Problem(self.lengths, self.work, self.options.shares(self.ranks), caps)

    def answer(self, name: str) -> "Answer":
        """What a layout gives."""
        choice = self.options if name == self.options.name else name
        layout = layout_of(choice, self.lengths, self.ranks, work=self.work)
        held = pieces_of(layout, self.lengths)
        return Answer(name, held, loads(self.problem, held), self)


@dataclass(frozen=True)
class Answer:
    """One layout of the row.

    Attributes:
        name: of the layout.
        held: pieces of every rank.
        loads: what every rank has to do.
        question: what was asked.
    """

    name: str
    held: Sequence[Sequence[Piece]]
    loads: Loads
    question: Question

    def ranks(self) -> list[dict[str, Any]]:
        """Figures of every rank, for JSON."""
        cost, found, shares = self.question.cost, self.loads, self.question.problem.shares
        pairs, tokens = sum(found.work), sum(found.tokens)
        compute, link = cost.compute(found), cost.links(found)
        return [
            {
                "rank": rank,
                "tokens": found.tokens[rank],
                "tokens_over_share": found.tokens[rank] / (share * tokens),
                "pairs": found.work[rank],
                "work_over_share": found.work[rank] / (share * pairs),
                "keys_received": found.received[rank],
                "keys_served": found.served[rank],
                "bytes_received": found.received[rank] * self.question.key_bytes,
                "fragments": found.fragments[rank],
                "compute_ms": 1e3 * compute[rank],
                "link_ms": 1e3 * link[rank],
            }
            for rank, share in enumerate(shares)
        ]


def content(question: Question, answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures, for JSON."""
    bound = least_received(question.problem) if question.work == Causal() else None
    return {
        "tokens": question.problem.tokens,
        "documents": len(question.lengths),
        "ranks": question.ranks,
        "keys_received_bound": bound,
        "cost": asdict(question.cost),
        "layouts": {answer.name: answer.ranks() for answer in answers},
    }


def save(path: Path, question: Question, answers: Sequence[Answer]) -> None:
    """Write all figures as JSON."""
    path.write_text(json.dumps(content(question, answers), indent=2) + "\n", encoding="utf-8")
