"""The demo's picture. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from lightning_cp.cli.demo.report import MB, Report

SINGLE = "#9aa5b1"
GROUP = "#d9480f"
INK = "#1f2933"
LIGHT = "#e4e7eb"
BAR_HEIGHT = 0.26
"""Inches per bar that keep its label readable."""
ROUNDING = 2.0**-24
"""Largest relative error of one rounding to float32."""
LINEAR = 1e-8
"""The axis of differences is linear below and logarithmic above, so that it has a zero."""


def draw(report: Report, path: Path) -> None:
    """Losses of both runs and their difference; tokens, work and memory of every rank."""
    height = max(5.8, 1.8 + 3 * BAR_HEIGHT * (len(report.ranks) + 1))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(12, height), dpi=150, layout=layout, facecolor="white")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.15, 1), wspace=0.04)
    left, right = halves
    loss, difference = left.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    _losses(loss, report)
    _differences(difference, report)
    ranks, single = report.ranks, report.single
    panels = right.subplots(3, 1, sharey=True)
    for axes, title, values, number in (
        (panels[0], "tokens", [r.tokens for r in (*ranks, single)], "{:,}"),
        (panels[1], "score work: query-key pairs", [r.work for r in (*ranks, single)], "{:,}"),
        (
            panels[2],
            "peak of activations, MB",
            [r.peak_bytes / MB for r in (*ranks, single)],
            "{:,.1f}",
        ),
    ):
        _bars(axes, values, title, number)
    figure.suptitle(
        f"One sequence of {report.single.tokens:,} tokens on {len(ranks)} "
        f"rank{'s' if len(ranks) > 1 else ''}, and in one process",
        color=INK,
        fontsize=14,
    )
    figure.savefig(path)


def _losses(axes: Any, report: Report) -> None:
    steps = range(1, len(report.single.losses) + 1)
    marker = "o" if len(steps) == 1 else None
    axes.plot(
        steps, report.single.losses, color=SINGLE, linewidth=6, marker=marker, label="one process"
    )
    axes.plot(
        steps,
        report.ranks[0].losses,
        color=GROUP,
        linewidth=1.6,
        marker=marker,
        markersize=3,
        label=f"context parallel, {len(report.ranks)} ranks",
    )
    axes.set_ylabel("loss", color=INK)
    axes.legend(frameon=False, labelcolor=INK)
    _plain(axes)


def _differences(axes: Any, report: Report) -> None:
    steps = range(1, len(report.single.losses) + 1)
    shown = report.relative_differences
    axes.axhline(ROUNDING, color=SINGLE, linewidth=1, linestyle="--")
    axes.annotate(
        "one float32 rounding",
        (1, ROUNDING),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=8,
        color=INK,
    )
    axes.plot(steps, shown, color=GROUP, linewidth=0, marker="o", markersize=3.5, clip_on=False)
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_ylim(0, max(1e-5, 2 * max(shown)))
    axes.set_ylabel("relative difference", color=INK, fontsize=9)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)


def _bars(axes: Any, values: Sequence[float], title: str, number: str) -> None:
    """One bar per rank, and the last for the one process."""
    names = [*(f"rank {i}" for i in range(len(values) - 1)), "one process"]
    colors = [GROUP] * (len(values) - 1) + [SINGLE]
    bars = axes.barh(range(len(values)), values, color=colors, height=0.7)
    axes.bar_label(bars, [number.format(v) for v in values], padding=4, color=INK, fontsize=9)
    axes.set_yticks(range(len(values)), names)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(0, max(values) * 1.2)
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    _plain(axes)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
