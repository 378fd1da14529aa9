"""The picture of `lightning-cp plan`. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_cp.cli.plan.figures import Answer

INK, LIGHT, SHORT = "#1f2933", "#e4e7eb", "#ced4da"
COLORED = 20
"""The longest documents have a colour each, the others are grey."""


def draw(answers: Sequence[Answer], path: Path) -> None:
    """For every layout a bar for each rank: its pieces, in the colours of their documents."""
    ranks = answers[0].question.ranks
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    size = (5 * len(answers), 1.8 + 0.28 * ranks)
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    panels: Any = figure.subplots(1, len(answers), sharey=True, squeeze=False)
    for axes, answer in zip(panels[0], answers, strict=True):
        _bars(axes, answer)
    panels[0][0].set_ylabel("rank", color=INK)
    figure.suptitle("Tokens of the ranks; a colour for each long document, pale where they begin")
    figure.savefig(path)


def _bars(axes: Any, answer: Answer) -> None:
    lengths = answer.question.lengths
    longest = sorted(range(len(lengths)), key=lambda doc: (-lengths[doc], doc))[:COLORED]
    colors = {doc: colormaps["tab20"](place) for place, doc in enumerate(longest)}
    for rank, pieces in enumerate(answer.held):
        left = 0
        for piece in pieces:
            width = piece.stop - piece.start
            depth = (piece.start + piece.stop) / 2 / lengths[piece.doc]
            axes.barh(
                rank,
                width,
                left=left,
                height=0.8,
                color=colors.get(piece.doc, SHORT),
                alpha=0.35 + 0.65 * depth,
                edgecolor="white",
                linewidth=0.3,
            )
            left += width
        work = answer.loads.work[rank] / max(answer.loads.work)
        axes.text(left, rank, f" work {work:.2f}", va="center", fontsize=6, color=INK)
    axes.set_ylim(len(answer.held) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(answer.loads.tokens))
    axes.set_title(answer.name, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("tokens (work: over that of the busiest rank)", color=INK, fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8, left=False)
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
