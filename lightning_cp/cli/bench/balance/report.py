"""From draws to rows of the result, to a table and to JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from lightning_cp.cli.bench.balance.measure import BASELINE, Draw
from lightning_cp.cli.bench.balance.rows import Setting


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout in one setting, over all draws.

    Attributes:
        tokens: of the row.
        ranks: of the group.
        layout: its name.
        work_max_over_mean_avg: mean over draws of the busiest rank's work over the mean.
        work_max_over_mean_worst: of the worst draw.
        tokens_max_over_mean_avg: the same for tokens.
        tokens_max_over_mean_worst: of the worst draw.
        bytes_over_row: keys that a rank receives, mean over ranks and draws, over the row's.
        bytes_over_per_document: mean over draws of the keys received over those of zigzag within
            every document.
        bytes_over_bound: keys received in all draws over the least that any layout with the
            default caps makes the ranks receive.
        fragments_over_per_document: mean over draws of the pieces over those of zigzag within
            every document.
        makespan: modelled time of the slowest rank over the mean time of computing, mean over
            draws; nothing overlaps.
        makespan_overlapped: the same when messages travel while tiles are computed.
        plan_ms: CPU time of making a layout, mean over draws, milliseconds.
        plan_ms_worst: of the worst draw.
    """

    tokens: int
    ranks: int
    layout: str
    work_max_over_mean_avg: float
    work_max_over_mean_worst: float
    tokens_max_over_mean_avg: float
    tokens_max_over_mean_worst: float
    bytes_over_row: float
    bytes_over_per_document: float
    bytes_over_bound: float
    fragments_over_per_document: float
    makespan: float
    makespan_overlapped: float
    plan_ms: float
    plan_ms_worst: float


def rows_of(setting: Setting, draws: Mapping[str, Sequence[Draw]]) -> list[Row]:
    """The rows of one setting, from draws by layout; the draws of all layouts in one order."""
    base = draws[BASELINE]
    found = []
    for name, own in draws.items():
        pairs = list(zip(own, base, strict=True))
        found.append(
            Row(
                tokens=setting.tokens,
                ranks=setting.ranks,
                layout=name,
                work_max_over_mean_avg=fmean(draw.work for draw in own),
                work_max_over_mean_worst=max(draw.work for draw in own),
                tokens_max_over_mean_avg=fmean(draw.tokens for draw in own),
                tokens_max_over_mean_worst=max(draw.tokens for draw in own),
                bytes_over_row=fmean(draw.received for draw in own)
                / (setting.ranks * setting.tokens),
                bytes_over_per_document=fmean(a.received / b.received for a, b in pairs),
                bytes_over_bound=sum(draw.received for draw in own)
                / sum(draw.bound for draw in own),
                fragments_over_per_document=fmean(a.fragments / b.fragments for a, b in pairs),
                makespan=fmean(draw.alone for draw in own),
                makespan_overlapped=fmean(draw.overlapped for draw in own),
                plan_ms=fmean(draw.plan_ms for draw in own),
                plan_ms_worst=max(draw.plan_ms for draw in own),
            )
        )
    return found


def print_rows(console: Console, rows: Sequence[Row], draws: int) -> None:
    """The table."""
    table = Table(title=f"lengths of real files, {draws} rows each; avg / worst")
    for column in (
        "tokens, ranks", "layout", "work max/mean", "tokens max/mean", "bytes/row",
        "/ per document", "/ bound", "fragments", "makespan", "overlapped", "plan ms",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "layout" else "right")
    for place, row in enumerate(rows):
        first = place == 0 or rows[place - 1].tokens != row.tokens
        table.add_row(
            f"{row.tokens}, {row.ranks}" if first else "",
            row.layout,
            f"{row.work_max_over_mean_avg:.3f} / {row.work_max_over_mean_worst:.3f}",
            f"{row.tokens_max_over_mean_avg:.3f} / {row.tokens_max_over_mean_worst:.3f}",
            f"{row.bytes_over_row:.3f}",
            f"{row.bytes_over_per_document:.3f}",
            f"{row.bytes_over_bound:.2f}",
            f"{row.fragments_over_per_document:.3f}",
            f"{row.makespan:.3f}",
            f"{row.makespan_overlapped:.3f}",
            f"{row.plan_ms:.1f} / {row.plan_ms_worst:.1f}",
            end_section=place + 1 < len(rows) and rows[place + 1].tokens != row.tokens,
        )
    console.print(table)


def save(path: Path, rows: Sequence[Row], draws: int) -> None:
    """Write the rows as JSON."""
    content = {"draws": draws, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
