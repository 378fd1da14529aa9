"""The result: a row per case, as numbers, as a table, as a file."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_cp.cli.bench.attention import figures
from lightning_cp.cli.bench.attention.figures import Spread
from lightning_cp.cli.bench.attention.results import CaseResult, RankResult
from lightning_cp.cli.bench.attention.settings import Case, Settings

MS = 1e3
MB = 1e6
NAME = 15
"""Width at which names of rows wrap between words."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case.

    Attributes:
        case: what was measured.
        efficiency: the ideal's time over the executor's; CPU time, or wall time over an emulated
            link.
        repeatability: the ideal's time over its own in the next run.
        nonkernel_fraction: CPU time outside the kernel over that in it, busiest rank.
        phases: CPU time in ms of a forward and a backward on the busiest rank, by phase.
        error_ratio: the worst of out, dq, dk and dv, see `truth.Truth.ratios`.
        bytes_moved: bytes that all ranks sent.
        bytes_planned: what their plans say of it.
        memory: peak bytes of forward and backward, of the rank with most.
        ideal_ms: the ideal's time on the slowest rank, as `efficiency` takes it.
        real_ms: the executor's.
        ideal_wall_ms: wall time, whatever `efficiency` takes.
        real_wall_ms: the executor's.
    """

    case: Case
    efficiency: Spread
    repeatability: Spread
    nonkernel_fraction: float
    phases: dict[str, float]
    error_ratio: float
    bytes_moved: int
    bytes_planned: int
    memory: tuple[int, int]
    ideal_ms: float
    real_ms: float
    ideal_wall_ms: float
    real_wall_ms: float

    @property
    def name(self) -> str:
        """Exchange and dtype."""
        case = self.case
        return f"{case.exchange} {case.dtype}{'' if case.overlap else ', no overlap'}"

    def as_dict(self, settings: Settings) -> dict[str, Any]:
        """The row of the JSON file."""
        return {
            "exchange": self.case.exchange,
            "layout": settings.layout,
            "world": settings.world,
            "dtype": self.case.dtype,
            "seqlen": settings.seqlen,
            "overlap": self.case.overlap,
            "network": settings.network,
            "efficiency": self.efficiency.median,
            "efficiency_spread": self.efficiency[1:],
            "aa_spread": self.repeatability[1:],
            "nonkernel_fraction": self.nonkernel_fraction,
            "phases": self.phases,
            "error_ratio": self.error_ratio,
            "bytes_moved": self.bytes_moved,
            "bytes_planned": self.bytes_planned,
            "memory_forward": self.memory[0],
            "memory_backward": self.memory[1],
            "ideal_ms": self.ideal_ms,
            "real_ms": self.real_ms,
            "ideal_wall_ms": self.ideal_wall_ms,
            "real_wall_ms": self.real_wall_ms,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows.

    Attributes:
        settings: what was asked for.
        rows: one per case.
        link_rate: of the emulated link in Gbit/s, of the slowest rank, median over launches; None
            without one.
    """

    settings: Settings
    rows: list[Row]
    link_rate: float | None

    @classmethod
    def of(cls, settings: Settings, launches: Sequence[Sequence[RankResult]]) -> "Report":
        """From what every rank measured, launch by launch."""
        rates = [
            [result.link_rate for result in ranks if result.link_rate is not None]
            for ranks in launches
        ]
        rows = [
            _row(settings, case, [[result.cases[index] for result in ranks] for ranks in launches])
            for index, case in enumerate(settings.cases)
        ]
        rate = median(min(found) for found in rates) if settings.network is not None else None
        return cls(settings=settings, rows=rows, link_rate=rate)

    @property
    def clock(self) -> str:
        """What `efficiency` compares: waiting costs no CPU time, so links are measured by wall."""
        return "cpu" if self.settings.network is None else "wall"

    def save(self, path: Path) -> None:
        """Write the JSON file."""
        value = {
            "rows": [row.as_dict(self.settings) for row in self.rows],
            **dataclasses.asdict(self.settings),
            "clock": self.clock,
            "link_rate": self.link_rate,
        }
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")

    def print(self, console: Console) -> None:
        """Print two tables: times, and what does not depend on them."""
        times = ("efficiency", "A/A", "ideal ms", "real ms", "overhead")
        counts = ("error", "MB sent", "MB forward", "MB backward")
        for title, caption, names, cells in (
            (self.title, self._caption, times, _time_cells),
            (None, "peak MB of new tensors on a rank; MB sent by all", counts, _count_cells),
        ):
            table = Table(title=title, caption=caption, box=box.SIMPLE)
            table.add_column("", min_width=NAME)
            for name in names:
                table.add_column(name, justify="right", no_wrap=True)
            for row in self.rows:
                table.add_row(row.name, *cells(row))
            console.print(table)

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        chosen = self.settings
        parts = [
            f"attention: seqlen {chosen.seqlen:,}, world {chosen.world}",
            f"{chosen.heads} heads of {chosen.head_dim}",
            chosen.layout,
        ]
        if chosen.kv_heads != chosen.heads:
            parts.insert(2, f"{chosen.kv_heads} key heads")
        if chosen.documents is not None:
            parts.append(f"{len(chosen.documents)} documents")
        if chosen.window is not None:
            parts.append(f"window {chosen.window}")
        if chosen.network is not None:
            parts.append(f"{chosen.network:g} Gbit/s")
        return ", ".join(parts)

    @property
    def _caption(self) -> str:
        clock = "CPU time" if self.clock == "cpu" else "wall time"
        caption = f"{clock} of the slowest rank; in brackets least and most of the launches"
        if self.link_rate is not None:
            caption += f"; the link itself ran at {self.link_rate:.3g} Gbit/s"
        return caption


def _row(settings: Settings, case: Case, launches: list[list[CaseResult]]) -> Row:
    """One case from `[launch][rank]`."""
    ideal_cpu = [[rank.ideal_cpu for rank in ranks] for ranks in launches]
    real_cpu = [[rank.real_cpu for rank in ranks] for ranks in launches]
    ideal_wall = [[rank.ideal_wall for rank in ranks] for ranks in launches]
    real_wall = [[rank.real_wall for rank in ranks] for ranks in launches]
    ideal, real = (ideal_cpu, real_cpu) if settings.network is None else (ideal_wall, real_wall)
    phases = [figures.busiest([rank.phases for rank in ranks]) for ranks in launches]
    checks = [rank.checks for rank in launches[0] if rank.checks is not None]
    return Row(
        case=case,
        efficiency=figures.spread(list(map(figures.efficiency, ideal, real))),
        repeatability=figures.spread(list(map(figures.repeatability, ideal))),
        nonkernel_fraction=median(map(figures.nonkernel_fraction, phases)),
        phases={name: MS * x for name, x in figures.median_phases(phases).items()},
        error_ratio=max(error for found in checks for error in found.errors.values()),
        bytes_moved=sum(found.bytes_sent for found in checks),
        bytes_planned=settings.planned_bytes(case),
        memory=(
            max(found.memory[0] for found in checks),
            max(found.memory[1] for found in checks),
        ),
        ideal_ms=MS * figures.typical(ideal),
        real_ms=MS * figures.typical(real),
        ideal_wall_ms=MS * figures.typical(ideal_wall),
        real_wall_ms=MS * figures.typical(real_wall),
    )


def _time_cells(row: Row) -> tuple[str, ...]:
    middle, least, most = row.efficiency
    return (
        f"{middle:.2f} ({least:.2f}-{most:.2f})",
        f"{row.repeatability.least:.2f}-{row.repeatability.greatest:.2f}",
        f"{row.ideal_ms:.1f}",
        f"{row.real_ms:.1f}",
        f"{100 * row.nonkernel_fraction:.1f} %",
    )


def _count_cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.error_ratio:.1e}" if row.case.dtype == "fp64" else f"{row.error_ratio:.2f} x",
        f"{row.bytes_moved / MB:.2f}",
        f"{row.memory[0] / MB:.2f}",
        f"{row.memory[1] / MB:.2f}",
    )
