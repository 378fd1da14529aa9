"""The benchmark's picture. Needs matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_cp.cli.bench.attention.report import Report

INK = "#1f2933"
LIGHT = "#e4e7eb"
BAR = "#d9480f"
IDEAL = "#9aa5b1"
COLORS = {
    "kernel": "#9aa5b1",
    "merge": "#d9480f",
    "accumulate": "#f08c00",
    "copy": "#2b8a3e",
    "communication": "#1971c2",
    "background": "#74c0fc",
    "other": "#862e9c",
}
"""Phases in the order in which they are stacked."""
BAR_INCHES = 0.42
"""Height of a row that keeps its label readable."""


def draw(report: Report, path: Path) -> None:
    """Efficiency of every case with its spread over launches, and where its CPU time goes."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    height = 2.6 + BAR_INCHES * len(report.rows)
    figure = Figure(figsize=(12, height), dpi=150, layout=layout, facecolor="white")
    panels: Any = figure.subplots(1, 2, sharey=True)
    _efficiency(panels[0], report)
    _phases(panels[1], report)
    panels[0].set_yticks(range(len(report.rows)), [row.name for row in report.rows])
    panels[0].set_ylim(len(report.rows) - 0.4, -0.6)
    figure.suptitle(report.title, color=INK, fontsize=13)
    figure.savefig(path)


def _efficiency(axes: Any, report: Report) -> None:
    values = [row.efficiency.median for row in report.rows]
    below = [row.efficiency.median - row.efficiency.least for row in report.rows]
    above = [row.efficiency.greatest - row.efficiency.median for row in report.rows]
    bars = axes.barh(
        range(len(values)),
        values,
        xerr=(below, above),
        color=BAR,
        ecolor=INK,
        height=0.7,
        capsize=3,
    )
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, color=INK, fontsize=9)
    axes.axvline(1, color=IDEAL, linewidth=1, linestyle="--")
    highest = max(row.efficiency.greatest for row in report.rows)
    axes.set_xlim(0, 1.15 * max(1.0, highest))
    axes.set_title(f"efficiency: ideal / real, {report.clock} time", loc="left", color=INK)
    _plain(axes)


def _phases(axes: Any, report: Report) -> None:
    lefts = [0.0] * len(report.rows)
    for phase, color in COLORS.items():
        widths = [row.phases.get(phase, 0.0) for row in report.rows]
        axes.barh(range(len(widths)), widths, left=lefts, color=color, height=0.7, label=phase)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_title("CPU time of the busiest rank by phase, ms", loc="left", color=INK)
    axes.legend(
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
    )
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, left=False)
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
