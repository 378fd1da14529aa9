"""`lightning-cp bench balance`: options, all layouts of all rows, and what is written."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lightning_cp.cli.bench.balance.measure import LAYOUTS, measure
from lightning_cp.cli.bench.balance.report import print_rows, rows_of, save
from lightning_cp.cli.bench.balance.rows import SETTINGS, draws
from lightning_cp.cli.outputs import check_outputs
from lightning_cp.errors import ConfigError

SUMMARY = "compare layouts of packed rows of real lengths: balance, bytes, pieces, planning time"
PICTURE = "balance.png"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--draws", type=int, default=len(draws()), help="rows of each setting, by seed from 0"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"draw {PICTURE} in DIR")


def run(args: argparse.Namespace) -> None:
    """Lay out all rows, print a table, write what was asked for.

    Raises:
        ConfigError: if an option cannot work.
    """
    most = len(draws())
    if not 1 <= args.draws <= most:
        raise ConfigError(f"--draws {args.draws} must lie between 1 and {most}, the rows there are")
    check_outputs(args, PICTURE)
    console = Console()
    rows = []
    for setting in track(SETTINGS, "settings", console=console, transient=True):
        found = {
            name: [measure(seed, setting, name) for seed in range(args.draws)] for name in LAYOUTS
        }
        rows += rows_of(setting, found)
    print_rows(console, rows, args.draws)
    if args.json is not None:
        save(args.json, rows, args.draws)
    if args.out is not None:
        # Needs matplotlib, an extra: everything else of this package works without.
        from lightning_cp.cli.bench.balance.picture import draw

        draw(rows, args.out / PICTURE)
