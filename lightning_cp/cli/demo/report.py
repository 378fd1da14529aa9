"""How the two runs of the demo compare, as numbers, as a table, as a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_cp.cli.demo.job import RankResult

MB = 1e6


@dataclass(frozen=True)
class Report:
    """The run of a group beside the run of one process.

    Attributes:
        ranks: what every rank of the group saw.
        single: what the one process saw.
    """

    ranks: list[RankResult]
    single: RankResult

    @property
    def relative_differences(self) -> list[float]:
        """Of the losses, step by step."""
        pairs = zip(self.ranks[0].losses, self.single.losses, strict=True)
        return [abs(several - one) / abs(one) for several, one in pairs]

    @property
    def peak_ratio(self) -> float:
        """The largest peak of a rank over the peak of the one process."""
        return max(rank.peak_bytes for rank in self.ranks) / self.single.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """The content of `report.json`."""
        return {
            "loss_cp": self.ranks[0].losses,
            "loss_single": self.single.losses,
            "max_rel_loss_diff": max(self.relative_differences),
            "peak_activation_bytes": {
                "cp": [rank.peak_bytes for rank in self.ranks],
                "single": self.single.peak_bytes,
            },
            "tokens_per_rank": [rank.tokens for rank in self.ranks],
            "work_per_rank": [rank.work for rank in self.ranks],
        }

    def save(self, path: Path) -> None:
        """Write `report.json`."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="ascii")

    def print(self, console: Console) -> None:
        """Print the table."""
        table = Table(
            title="one sequence on several processes, and on one",
            caption=f"losses differ by at most {max(self.relative_differences):.1e} (relative), "
            f"the largest peak of a rank is {self.peak_ratio:.2f} of one process's",
        )
        table.add_column("")
        for name in ("tokens", "query-key pairs", "peak of activations"):
            table.add_column(name, justify="right")
        for name in ("first loss", "last loss"):
            table.add_column(name, justify="right")
        for number, rank in enumerate(self.ranks):
            table.add_row(f"rank {number}", *_cells(rank))
        table.add_section()
        table.add_row("one process", *_cells(self.single))
        console.print(table)


def _cells(result: RankResult) -> tuple[str, ...]:
    return (
        f"{result.tokens:,}",
        f"{result.work:,}",
        f"{result.peak_bytes / MB:.1f} MB",
        f"{result.losses[0]:.6f}",
        f"{result.losses[-1]:.6f}",
    )
