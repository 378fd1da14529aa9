"""What every layout gives the ranks."""

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
from lightning_cp.cli.plan.model import RULE, Model, Verdict, attention_memory, verdict
from lightning_cp.layout import LAYOUTS

NAMES = (*sorted(LAYOUTS), *reversed(DOCUMENT_LAYOUTS))
"""The layouts that are compared, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        lengths: tokens of every document, in the order of the row.
        ranks: of the group.
        options: of the balanced layout.
        work: what attention costs.
        model: sizes of the model.
        cost: predicts times.
    """

    lengths: tuple[int, ...]
    ranks: int
    options: Balanced
    work: Work
    model: Model
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
        memory = attention_memory(layout, self.work.mask(self.lengths), self.model)
        return Answer(name, held, loads(self.problem, held), memory, self)


@dataclass(frozen=True)
class Answer:
    """One layout of the row.

    Attributes:
        name: of the layout.
        held: pieces of every rank.
        loads: what every rank has to do.
        attention: peak bytes of an attention call on every rank.
        question: what was asked.
    """

    name: str
    held: Sequence[Sequence[Piece]]
    loads: Loads
    attention: Sequence[int]
    question: Question

    def ranks(self) -> list[dict[str, Any]]:
        """Figures of every rank, for JSON."""
        cost, found, shares = self.question.cost, self.loads, self.question.problem.shares
        model = self.question.model
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
                "bytes_received": found.received[rank] * model.key_bytes,
                "fragments": found.fragments[rank],
                "compute_ms": 1e3 * compute[rank],
                "link_ms": 1e3 * link[rank],
                "attention_bytes": self.attention[rank],
                "activation_bytes": model.activations(found.tokens[rank]),
            }
            for rank, share in enumerate(shares)
        ]


def judged(question: Question, answers: Sequence[Answer]) -> Verdict:
    """Whether cutting the row pays."""
    found = {answer.name: answer.loads for answer in answers}
    return verdict(question.problem, question.cost, found)


def content(question: Question, answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures, for JSON."""
    found = judged(question, answers)
    quickest = next(answer.loads for answer in answers if answer.name == found.layout)
    bound = least_received(question.problem) if question.work == Causal() else None
    return {
        "tokens": question.problem.tokens,
        "documents": len(question.lengths),
        "ranks": question.ranks,
        "keys_received_bound": bound,
        "cost": asdict(question.cost),
        "model": asdict(question.model),
        "activations": RULE,
        "pays": {
            "cutting": found.pays,
            **found._asdict(),
            "activation_bytes": max(question.model.activations(n) for n in quickest.tokens),
            "whole_activation_bytes": question.model.activations(found.whole_tokens),
        },
        "layouts": {answer.name: answer.ranks() for answer in answers},
    }


def save(path: Path, question: Question, answers: Sequence[Answer]) -> None:
    """Write all figures as JSON."""
    path.write_text(json.dumps(content(question, answers), indent=2) + "\n", encoding="utf-8")
