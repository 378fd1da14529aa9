"""Steps as timelines. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from lightning_cp.cli.bench.overlap.results import RankResult, Row, Spans

INK = "#1f2933"
MS = 1e3
COLORS = {
    "computing": "#d9480f",
    "waiting": "#e4e7eb",
    "messages": "#1971c2",
    "parameters": "#2b8a3e",
}
"""What a rank does, then what is on its link: keys, values and their gradients; parameters."""


def draw(rank: RankResult, rows: Sequence[Row], path: Path) -> None:
    """The last step of a rank in every window: what it does, and below what is on its link."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    size = (12, 1.4 + 1.1 * len(rows))
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    panels: Any = figure.subplots(len(rows), 1, sharex=True)
    for axes, row in zip(panels, rows, strict=True):
        _step(axes, rank.spans[row.window], rank.seconds[row.window][-1])
        name = f"auto ({rank.chosen})" if row.window == "auto" else row.window
        axes.set_title(f"{name}: {MS * row.seconds:.0f} ms", loc="left", color=INK, fontsize=10)
    panels[-1].set_xlabel("ms since the step began", color=INK)
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()],
        frameon=False,
        labelcolor=INK,
        ncols=len(COLORS),
        loc="outside upper right",
    )
    figure.savefig(path)


def _step(axes: Any, spans: Spans, seconds: float) -> None:
    axes.barh(1, MS * seconds, color=COLORS["computing"], height=0.8)
    for kind, start, stop in spans:
        lane = 1 if kind == "waiting" else 0
        axes.barh(lane, MS * (stop - start), left=MS * start, color=COLORS[kind], height=0.8)
    axes.set_yticks([1, 0], ["rank 0", "its link"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, left=False)
