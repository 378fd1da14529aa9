"""`lightning-cp bench attention`, the user's side: options, the launches, table, JSON, picture."""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lightning_cp.cli.bench.attention.report import Report
from lightning_cp.cli.bench.attention.results import RankResult
from lightning_cp.cli.bench.attention.settings import DTYPES, Launch, Settings
from lightning_cp.cli.children import run_ranks
from lightning_cp.cli.outputs import check_outputs
from lightning_cp.errors import ConfigError, ContextParallelError
from lightning_cp.layout import LAYOUTS
from lightning_cp.plan import SCHEDULES

SUMMARY = "measure attention of a group of processes against the bare kernel calls of each"
PICTURE = "attention.png"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for option, default, text in (
        ("--world", 2, "processes that share the row, one thread each"),
        ("--seqlen", 8192, "tokens of the row"),
        ("--heads", 8, "query heads"),
        ("--head-dim", 64, "size of a head"),
        ("--repeats", 9, "pairs of ideal and real runs of each launch"),
        ("--launches", 5, "how often the processes are started"),
    ):
        parser.add_argument(option, type=int, default=default, help=text)
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=argparse.SUPPRESS,
        help="key and value heads (default: as many as query heads)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=sorted(DTYPES),
        default=["fp32", "bf16"],
        help="of the tensors; several are measured one after the other",
    )
    parser.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="zigzag", help="who holds which tokens"
    )
    parser.add_argument(
        "--exchange",
        action="append",
        choices=sorted(SCHEDULES),
        default=argparse.SUPPRESS,
        help="how keys and values travel; may be given again (default: each that the heads allow)",
    )
    _add_special_options(parser)


def _add_special_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--documents",
        metavar="LENGTHS",
        default=argparse.SUPPRESS,
        help="lengths of packed documents, with commas between them, that add up to --seqlen "
        "(default: one document)",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="LEFT",
        help="keys before its own position that a query sees",
    )
    parser.add_argument(
        "--network",
        type=float,
        metavar="GBPS",
        help="emulate a full-duplex link of so many Gbit/s and compare wall times",
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="measure each exchange once more, with messages that never travel during compute",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"draw {PICTURE} in DIR")


def run(args: argparse.Namespace) -> None:
    """Start the processes as often as asked for, print a table, write what was asked for.

    Raises:
        ConfigError: if an option cannot work; nothing was started.
        ContextParallelError: if a process failed; what it printed says why.
    """
    settings = checked(args)
    console = Console()
    numbers = range(settings.launches)
    launches = [
        _launch(settings, first=number == 0)
        for number in track(numbers, "launches", console=console, transient=True)
    ]
    report = Report.of(settings, launches)
    report.print(console)
    if args.json is not None:
        report.save(args.json)
    if args.out is not None:
        _draw(report, args.out / PICTURE)


def checked(args: argparse.Namespace) -> Settings:
    """The settings, after all that can be known to fail before a process starts.

    Raises:
        ConfigError: if an option cannot work, or matplotlib is missing for a picture.
    """
    exchanges = getattr(args, "exchange", _allowed(args.world, args.heads))
    settings = Settings(
        world=args.world,
        seqlen=args.seqlen,
        heads=args.heads,
        kv_heads=getattr(args, "kv_heads", args.heads),
        head_dim=args.head_dim,
        dtypes=tuple(dict.fromkeys(args.dtype)),
        layout=args.layout,
        exchanges=tuple(dict.fromkeys(exchanges)),
        documents=_lengths(args.documents) if hasattr(args, "documents") else None,
        window=args.window,
        network=args.network,
        repeats=args.repeats,
        launches=args.launches,
        overlaps=(True, False) if args.no_overlap else (True,),
    )
    check_outputs(args, PICTURE)
    return settings


def _allowed(world: int, heads: int) -> list[str]:
    """Every exchange that has a head for each rank that swaps them."""
    return [name for name, make in SCHEDULES.items() if make().block(max(world, 1)) <= heads]


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--documents {text!r} are no lengths; write numbers with commas between them, "
            f"for example 5000,3192"
        )
    return tuple(map(int, parts))


def _launch(settings: Settings, *, first: bool) -> list[RankResult]:
    """What every rank of one launch measured."""
    with tempfile.TemporaryDirectory(prefix="lightning-cp-bench-") as work:
        job = Path(work) / "job.json"
        Launch(settings, first).save(job)
        codes = run_ranks("lightning_cp.cli.bench.attention.worker", job, settings.world, threads=1)
        if any(codes):
            raise ContextParallelError(
                f"the processes ended with exit codes {codes}; what they printed above says why"
            )
        return [RankResult.load(job.parent, rank) for rank in range(settings.world)]


def _draw(report: Report, path: Path) -> None:
    # Needs matplotlib, an extra: everything else of this package works without.
    from lightning_cp.cli.bench.attention.picture import draw

    draw(report, path)
