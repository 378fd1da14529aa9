"""The benchmark's picture. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_cp.cli.bench.balance.report import Row

INK, LIGHT, MARK = "#1f2933", "#e4e7eb", "#1f2933"
COLORS = {
    "contiguous": "#ced4da",
    "zigzag": "#9aa5b1",
    "per_document_zigzag": "#1971c2",
    "balanced": "#d9480f",
}
PANELS = (
    ("work_max_over_mean_avg", "work of the busiest rank / mean", "work_max_over_mean_worst"),
    ("bytes_over_row", "keys received by a rank / row", None),
    ("makespan", "modelled step / even compute", None),
)
"""Figure of a row, title, and the figure of the worst draw, which is marked."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Balance, bytes and modelled time of every layout, by setting."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(15, 5), dpi=150, layout=layout, facecolor="white")
    panels: Any = figure.subplots(1, len(PANELS))
    for axes, (name, title, worst) in zip(panels, PANELS, strict=True):
        _bars(axes, rows, name, worst)
        axes.set_title(title, loc="left", color=INK, fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Layouts of packed rows, lengths of real files", color=INK, fontsize=13)
    figure.savefig(path)


def _bars(axes: Any, rows: Sequence[Row], name: str, worst: str | None) -> None:
    settings = list(dict.fromkeys((row.tokens, row.ranks) for row in rows))
    width = 0.8 / len(COLORS)
    for place, (layout, color) in enumerate(COLORS.items()):
        own = [row for row in rows if row.layout == layout]
        at = [settings.index((row.tokens, row.ranks)) + width * (place - 1.5) for row in own]
        values = [getattr(row, name) for row in own]
        bars = axes.bar(at, values, width=width, color=color, label=layout)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7, color=INK, padding=2)
        if worst is not None:
            axes.scatter(at, [getattr(row, worst) for row in own], s=9, color=MARK, marker="_")
    axes.set_xticks(range(len(settings)), [f"{n // 1024}k, {ranks}" for n, ranks in settings])
    axes.set_xlabel("tokens, ranks" + (" (dash: the worst row)" if worst else ""), color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
