"""What was measured: rows, in JSON files that can be added up, and totals over them.

[Note: commands] Times are compared only within one command and one draw, where layouts took turns;
rows of several commands are kept apart by number, and their sums are compared.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning_cp.cli.bench.attention.figures import slowest
from lightning_cp.cli.bench.packed.settings import Sizes
from lightning_cp.errors import ConfigError

UNEVEN = 1.5
"""Work of zigzag's busiest rank over the mean from which a draw counts as uneven."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of one draw.

    Attributes:
        command: number of the command that measured it.
        draw: number of the row of documents.
        layout: its name.
        work_max_over_mean: visible pairs of the busiest rank over the mean.
        tokens_max_over_mean: the same for tokens.
        zigzag_work_max_over_mean: what `work_max_over_mean` is for zigzag.
        bytes_received: in a forward and a backward, of the rank that receives most.
        seconds: CPU time `[rank][run]` of a forward and a backward.
    """

    command: int
    draw: int
    layout: str
    work_max_over_mean: float
    tokens_max_over_mean: float
    zigzag_work_max_over_mean: float
    bytes_received: int
    seconds: list[list[float]]

    @property
    def runs(self) -> list[float]:
        """Seconds of the slowest rank in every run."""
        return slowest(self.seconds)

    @property
    def slowest(self) -> float:
        """Median over runs of the seconds of the slowest rank."""
        return median(self.runs)

    def link_seconds(self, network: float | None) -> float:
        """What the busiest rank's link takes at so many Gbit/s; nothing without a rate."""
        return 0.0 if network is None else 8 * self.bytes_received / (network * 1e9)


class Spread(NamedTuple):
    """Least and greatest."""

    least: float
    greatest: float


@dataclass(frozen=True, kw_only=True)
class Total:
    """A layout beside the first one, over draws.

    Attributes:
        layout: its name.
        draws: how many were added up.
        seconds: the layout's, slowest ranks.
        first_seconds: those of the first layout in the same draws and commands.
        link_seconds: what the links of the layout's busiest ranks take.
        first_link_seconds: those of the first layout.
        aa: the first layout's time in a run over that in its next run, summed over the draws.
    """

    layout: str
    draws: int
    seconds: float
    first_seconds: float
    link_seconds: float
    first_link_seconds: float
    aa: Spread

    @property
    def ratio(self) -> float:
        """Time over that of the first layout."""
        return self.seconds / self.first_seconds

    @property
    def ratio_with_link(self) -> float:
        """The same when messages travel before tiles are computed."""
        return (self.seconds + self.link_seconds) / (self.first_seconds + self.first_link_seconds)


class Pair(NamedTuple):
    """A layout and the first one, with the same draw in the same command."""

    first: Row
    other: Row


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rows of one or several commands, those of one draw in the order of their turns.

    Attributes:
        sizes: of every row.
        network: rate of a link in Gbit/s, None without one.
        rows: all of them.
    """

    sizes: Sizes
    network: float | None
    rows: list[Row]

    @property
    def first(self) -> str:
        """The layout that the others are compared with."""
        return self.rows[0].layout

    @property
    def pairs(self) -> list[Pair]:
        """Every row beside that of the first layout; without one in its command it is left out."""
        firsts = {(row.command, row.draw): row for row in self.rows if row.layout == self.first}
        return [
            Pair(firsts[row.command, row.draw], row)
            for row in self.rows
            if (row.command, row.draw) in firsts
        ]

    def totals(self, least: float = 0.0) -> list[Total]:
        """Of every layout, over the draws in which zigzag's work is at least so uneven."""
        found = []
        for layout in dict.fromkeys(row.layout for row in self.rows):
            pairs = [
                pair
                for pair in self.pairs
                if pair.other.layout == layout and pair.other.zigzag_work_max_over_mean >= least
            ]
            if pairs:
                found.append(self._total(layout, pairs))
        return found

    def _total(self, layout: str, pairs: Sequence[Pair]) -> Total:
        return Total(
            layout=layout,
            draws=len(pairs),
            seconds=sum(pair.other.slowest for pair in pairs),
            first_seconds=sum(pair.first.slowest for pair in pairs),
            link_seconds=sum(pair.other.link_seconds(self.network) for pair in pairs),
            first_link_seconds=sum(pair.first.link_seconds(self.network) for pair in pairs),
            aa=repeated(pair.first for pair in pairs),
        )

    def save(self, path: Path) -> None:
        """Write the JSON file."""
        value = {
            "sizes": asdict(self.sizes),
            "network": self.network,
            "rows": [
                {**asdict(row), "slowest": row.slowest, "aa_spread": repeated([row])}
                for row in self.rows
            ],
            "totals": [self._as_dict(total) for total in self.totals()],
            "uneven_totals": [self._as_dict(total) for total in self.totals(UNEVEN)],
        }
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")

    def _as_dict(self, total: Total) -> dict[str, Any]:
        return {
            **asdict(total),
            "aa": total.aa,
            "ratio": total.ratio,
            "ratio_with_link": total.ratio_with_link if self.network is not None else None,
        }


def repeated(rows: Iterable[Row]) -> Spread:
    """The sum over rows of the slowest rank's time in a run over that in the next: 1 but for noise.

    Where rows have different numbers of runs, as many count as all have.
    """
    sums = [sum(runs) for runs in zip(*(row.runs for row in rows), strict=False)]
    ratios = [a / b for a, b in pairwise(sums)]
    return Spread(min(ratios), max(ratios))


def merged(files: Sequence[Path], network: float | None) -> Results:
    """The rows of several files.

    Args:
        files: written by `Results.save`, at least one.
        network: rate of a link in Gbit/s.

    Raises:
        ConfigError: if one cannot be read, or was measured with other sizes.
    """
    rows: list[Row] = []
    sizes: Sizes | None = None
    for file in files:
        found, own = _load(file)
        if sizes is not None and found != sizes:
            raise ConfigError(
                f"--merge: {file} was measured with {found}, the first file with {sizes}; "
                f"times of different sizes cannot be added up"
            )
        sizes = found
        last = max((row.command for row in rows), default=-1)
        rows += [_renumbered(row, last + 1) for row in own]
    assert sizes is not None  # invariant: the option takes one file or more
    return Results(sizes=sizes, network=network, rows=rows)


def _renumbered(row: Row, by: int) -> Row:
    return Row(**{**asdict(row), "command": row.command + by})


def _load(file: Path) -> tuple[Sizes, list[Row]]:
    names = [field.name for field in fields(Row)]
    try:
        found = json.loads(file.read_text(encoding="ascii"))
        rows = [Row(**{name: row[name] for name in names}) for row in found["rows"]]
        sizes = Sizes(**found["sizes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--merge: {file} is no file that `bench packed --json` wrote "
            f"({type(error).__name__}: {error})"
        ) from error
    if not rows:
        raise ConfigError(f"--merge: {file} has no rows")
    return sizes, rows
