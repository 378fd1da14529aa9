"""The tables of the benchmark."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_cp.cli.bench.packed.results import UNEVEN, Results, Spread, Total, repeated
from lightning_cp.cli.bench.packed.settings import MODES

MB = 1e6


def title(results: Results) -> str:
    """What was measured, in one line."""
    sizes = results.sizes
    return (
        f"packed rows of {sizes.tokens:,} tokens, {sizes.ranks} ranks, {sizes.heads} heads of "
        f"{sizes.head_dim}, {sizes.dtype}, {sizes.exchange}"
        f"{f', {sizes.layers} layers' if sizes.mode == 'step' else ''}"
    )


def print_results(console: Console, results: Results) -> None:
    """Print every draw, and two tables of totals."""
    console.print(_draws(results))
    for name, totals in (
        ("all draws", results.totals()),
        (f"draws in which zigzag's work max/mean is {UNEVEN} or more", results.totals(UNEVEN)),
    ):
        if totals:
            console.print(_totals(results, name, totals))


def _draws(results: Results) -> Table:
    table = Table(
        title=title(results),
        caption=f"{MODES[results.sizes.mode]}; CPU time of the slowest rank, median of runs",
        box=box.SIMPLE,
    )
    for name in ("draw", "layout", "work", "MB in", "s", "/ first", "A/A"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for first, row in results.pairs:
        leads = row is first
        table.add_row(
            str(row.draw) if leads else "",
            row.layout,
            f"{row.work_max_over_mean:.2f}",
            f"{row.bytes_received / MB:.1f}",
            f"{row.slowest:.3f}",
            "" if leads else f"{row.slowest / first.slowest:.3f}",
            _spread(repeated([row])) if leads else "",
        )
    return table


def _totals(results: Results, name: str, totals: Sequence[Total]) -> Table:
    linked = results.network is not None
    caption = f"of times over those of {results.first} in the same commands and draws"
    if linked:
        caption += f"; with link: with the bytes of the busiest rank at {results.network:g} Gbit/s"
    table = Table(title=name, caption=caption, box=box.SIMPLE)
    names = ["layout", "draws", "s", "/ first", "A/A"]
    for column in [*names, *(["with link"] if linked else [])]:
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    for total in totals:
        cells = [total.layout, str(total.draws), f"{total.seconds:.3f}", f"{total.ratio:.3f}"]
        cells.append(_spread(total.aa))
        if linked:
            cells.append(f"{total.ratio_with_link:.3f}")
        table.add_row(*cells)
    return table


def _spread(spread: Spread) -> str:
    return f"{spread.least:.2f}-{spread.greatest:.2f}"
