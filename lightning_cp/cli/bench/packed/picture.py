"""The benchmark's picture. Needs matplotlib."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_cp.cli.bench.packed.peer import PEER
from lightning_cp.cli.bench.packed.report import title
from lightning_cp.cli.bench.packed.results import Results

INK, LIGHT, LINK = "#1f2933", "#e4e7eb", "#74c0fc"
COLORS = {
    "contiguous": "#ced4da",
    "zigzag": "#9aa5b1",
    "per_document_zigzag": "#1971c2",
    "balanced": "#d9480f",
    PEER: "#2b8a3e",
}


def draw(results: Results, path: Path) -> None:
    """Time of every draw over that of the first layout, and the totals."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(12, 4.8), dpi=150, layout=layout, facecolor="white")
    panels: Any = figure.subplots(1, 2)
    _draws(panels[0], results)
    _totals(panels[1], results)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
        axes.grid(axis="y", color=LIGHT, linewidth=0.8)
        axes.set_axisbelow(True)
    figure.suptitle(title(results), color=INK, fontsize=13)
    figure.savefig(path)


def _draws(axes: Any, results: Results) -> None:
    aa = results.totals()[0].aa
    axes.axhspan(aa.least, aa.greatest, color=LIGHT, label="A/A of the total")
    axes.axhline(1, color=COLORS[results.first], linewidth=1.2, label=results.first)
    others = dict.fromkeys(row.layout for row in results.rows if row.layout != results.first)
    for name in others:
        own = [pair for pair in results.pairs if pair.other.layout == name]
        at = [pair.other.zigzag_work_max_over_mean for pair in own]
        ratios = [pair.other.slowest / pair.first.slowest for pair in own]
        axes.scatter(at, ratios, s=22, color=COLORS[name], label=name)
    axes.set_xlabel("zigzag: work of the busiest rank / mean", color=INK)
    axes.set_title(f"time / {results.first}, each draw", loc="left", color=INK, fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def _totals(axes: Any, results: Results) -> None:
    totals = results.totals()
    names = [total.layout for total in totals]
    times = [total.seconds / total.draws for total in totals]
    links = [total.link_seconds / total.draws for total in totals]
    bars = axes.bar(names, times, width=0.6, color=[COLORS[name] for name in names])
    axes.bar_label(bars, [f"{time:.3g}" for time in times], label_type="center", fontsize=9)
    if results.network is not None:
        label = f"link, {results.network:g} Gbit/s"
        axes.bar(names, links, bottom=times, width=0.6, color=LINK, label=label)
        axes.margins(y=0.2)
        axes.legend(frameon=False, fontsize=9)
    axes.set_title("seconds of the slowest rank, mean", loc="left", color=INK, fontsize=11)
