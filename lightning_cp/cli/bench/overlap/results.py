"""What is measured: of one rank, and of a window over all of them."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_cp.cli.bench.overlap.settings import ARMS

Spans = list[tuple[str, float, float]]
"""Kind, start and stop in seconds since a step began; see `lightning_cp.comm.throttle.Span`."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank measured.

    Attributes:
        rate: of the link, Gbit/s.
        chosen: the window that "auto" took.
        seconds: wall time of a step in every window of `ARMS`, one of each a round.
        again: a second step of the first window in every round.
        spans: what left this rank and when it waited, in the last step of every window.
    """

    rate: float
    chosen: str
    seconds: dict[str, list[float]]
    again: list[float]
    spans: dict[str, Spans]

    def save(self, folder: Path, rank: int) -> None:
        """Write it to the folder of the job."""
        _file(folder, rank).write_text(json.dumps(asdict(self)), encoding="ascii")

    @classmethod
    def load(cls, folder: Path, rank: int) -> "RankResult":
        """Read what `save` wrote."""
        return cls(**json.loads(_file(folder, rank).read_text(encoding="ascii")))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One window; times are wall time of the slowest rank, because waiting is what is measured.

    Attributes:
        window: when the next block is gathered.
        seconds: median of its steps.
        speedup: median over the rounds of the first window's time over its own.
        speedup_spread: the quartiles of that; of the first window its own next step's.
    """

    window: str
    seconds: float
    speedup: float
    speedup_spread: tuple[float, float]


def row_of(arm: str, ranks: Sequence[RankResult]) -> Row:
    """The figures of a window: of the first one against itself."""
    first, own = (_slowest([rank.seconds[name] for rank in ranks]) for name in (ARMS[0], arm))
    against = _slowest([rank.again for rank in ranks]) if arm == ARMS[0] else own
    ratios = [a / b for a, b in zip(first, against, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        window=arm,
        seconds=statistics.median(own),
        speedup=statistics.median(ratios),
        speedup_spread=(low, high),
    )


def _slowest(ranks: Sequence[list[float]]) -> list[float]:
    return [max(own) for own in zip(*ranks, strict=True)]
