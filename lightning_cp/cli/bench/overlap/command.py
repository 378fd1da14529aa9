"""`lightning-cp bench overlap`: options, one launch, the table, and what is written."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.overlap.results import RankResult, Row, row_of
from lightning_cp.cli.bench.overlap.settings import ARMS, Settings
from lightning_cp.cli.children import run_ranks
from lightning_cp.cli.outputs import check_outputs
from lightning_cp.errors import ContextParallelError

SUMMARY = "measure when to gather sharded parameters on a slow link that attention shares"
PICTURE = "overlap.png"
MS = 1e3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for option, default, text in (
        ("--world", 2, "processes"),
        ("--seqlen", 2048, "tokens of a row"),
        ("--layers", 4, "blocks"),
        ("--width", 512, "channels"),
        ("--heads", 8, "query and key heads"),
        ("--repeats", 9, "rounds; each has a step in every window, and one more in the first"),
    ):
        parser.add_argument(option, type=int, default=default, help=text)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of all tensors")
    parser.add_argument(
        "--network", type=float, default=1.0, metavar="GBPS", help="rate of the emulated link"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"draw {PICTURE}, steps as timelines, in DIR"
    )


def run(args: argparse.Namespace) -> None:
    """Measure, print, write.

    Raises:
        ConfigError: if an option cannot work; nothing was measured.
        ContextParallelError: if a process failed.
    """
    names = ("world", "seqlen", "layers", "width", "heads", "dtype", "network", "repeats")
    settings = Settings(**{name: getattr(args, name) for name in names})
    check_outputs(args, PICTURE)
    ranks = _measured(settings)
    rows = [row_of(arm, ranks) for arm in ARMS]
    Console().print(_table(settings, ranks[0], rows))
    if args.json is not None:
        found = {
            "settings": asdict(settings),
            "rate": ranks[0].rate,
            "auto": ranks[0].chosen,
            "rows": [asdict(row) for row in rows],
            "spans": [rank.spans for rank in ranks],
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.out is not None:
        from lightning_cp.cli.bench.overlap.picture import draw  # needs matplotlib

        draw(ranks[0], rows, args.out / PICTURE)


def _measured(settings: Settings) -> list[RankResult]:
    with tempfile.TemporaryDirectory(prefix="lightning-cp-overlap-") as work:
        job = Path(work) / "job.json"
        job.write_text(json.dumps(asdict(settings)), encoding="ascii")
        module = "lightning_cp.cli.bench.overlap.worker"
        codes = run_ranks(module, job, settings.world, threads=1)
        if any(codes):
            raise ContextParallelError(
                f"the processes ended with exit codes {codes}; what they printed above says why"
            )
        return [RankResult.load(job.parent, rank) for rank in range(settings.world)]


def _table(settings: Settings, rank: RankResult, rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"{settings.layers} blocks of {settings.width} channels, {settings.seqlen:,} tokens, "
        f"{settings.world} processes, {settings.dtype}, {rank.rate:.3g} Gbit/s measured",
        caption="a step, forward and backward; medians and quartiles of the rounds",
        box=box.SIMPLE,
    )
    for name in ("window", "ms", f"{rows[0].window} / it", "quartiles"):
        table.add_column(name, justify="left" if name == "window" else "right")
    for row in rows:
        name = f"auto ({rank.chosen})" if row.window == "auto" else row.window
        low, high = row.speedup_spread
        table.add_row(
            name, f"{MS * row.seconds:.0f}", f"{row.speedup:.3f}", f"{low:.3f}-{high:.3f}"
        )
    return table
