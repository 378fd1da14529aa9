"""`lightning-cp bench packed`: options, all layouts of all rows, and what is written."""

import argparse
import json
import math
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.packed.measure import measure, one_thread, row_of
from lightning_cp.cli.bench.packed.peer import PEER
from lightning_cp.cli.bench.packed.report import print_results
from lightning_cp.cli.bench.packed.results import Results, Row, merged
from lightning_cp.cli.bench.packed.settings import (
    ALL_LAYOUTS,
    DEFAULT_LAYOUTS,
    MODES,
    Settings,
    Sizes,
)
from lightning_cp.cli.bench.packed.worker import result_of
from lightning_cp.cli.children import run_ranks
from lightning_cp.cli.outputs import check_outputs
from lightning_cp.errors import ConfigError, ContextParallelError
from lightning_cp.plan import SCHEDULES

SUMMARY = "measure attention over packed rows of real lengths under several layouts"
PICTURE = "packed.png"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for option, default, text in (
        ("--tokens", 65536, "tokens of a row"),
        ("--ranks", 4, "ranks that share it"),
        ("--heads", 2, "heads, of queries and of keys"),
        ("--head-dim", 64, "size of a head"),
        ("--draws", 10, "number of rows"),
        ("--first", 0, "number of the first row"),
        ("--repeats", 3, "runs of every layout with a row, in turns"),
        ("--layers", 2, "layers of the model of a step, whose width is that of its heads"),
    ):
        parser.add_argument(option, type=int, default=default, help=text)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the tensors")
    parser.add_argument(
        "--layout",
        action="append",
        choices=ALL_LAYOUTS,
        default=argparse.SUPPRESS,
        help="may be given again; the others are compared with the first "
        f"(default: {', '.join(DEFAULT_LAYOUTS)})",
    )
    parser.add_argument(
        "--exchange", choices=sorted(SCHEDULES), default="direct", help="how keys and values travel"
    )
    parser.add_argument(
        "--mode",
        choices=list(MODES),
        default="turns",
        help="; ".join(f"{name}: {text}" for name, text in MODES.items()),
    )
    parser.add_argument(
        "--peer", choices=[PEER], help="measure another package beside the layouts, with processes"
    )
    parser.add_argument(
        "--network",
        type=float,
        metavar="GBPS",
        help="also add the time that the bytes of the rank that receives most take at this rate",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing, but add up what --json wrote",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"draw {PICTURE} in DIR")


def run(args: argparse.Namespace) -> None:
    """Measure or merge, print tables, write what was asked for.

    Raises:
        ConfigError: if an option cannot work; nothing was measured.
    """
    if args.network is not None and not (args.network > 0 and math.isfinite(args.network)):
        raise ConfigError(f"--network {args.network} is no rate; choose Gbit/s above 0")
    check_outputs(args, PICTURE)
    console = Console()
    results = measured(args, console) if args.merge is None else merged(args.merge, args.network)
    print_results(console, results)
    if args.json is not None:
        results.save(args.json)
    if args.out is not None:
        # Needs matplotlib, an extra: everything else of this package works without.
        from lightning_cp.cli.bench.packed.picture import draw

        draw(results, args.out / PICTURE)


def measured(args: argparse.Namespace, console: Console) -> Results:
    """All draws of this command.

    Raises:
        ConfigError: if an option cannot work.
    """
    settings = Settings(
        sizes=Sizes(
            tokens=args.tokens,
            ranks=args.ranks,
            heads=args.heads,
            head_dim=args.head_dim,
            dtype=args.dtype,
            exchange=args.exchange,
            mode=args.mode,
            layers=args.layers,
        ),
        layouts=tuple(getattr(args, "layout", DEFAULT_LAYOUTS)),
        seeds=range(args.first, args.first + args.draws),
        repeats=args.repeats,
        peer=args.peer,
    )
    if settings.sizes.mode != "turns":
        return Results(sizes=settings.sizes, network=args.network, rows=launched(settings))
    rows = []
    with one_thread():
        for seed in track(settings.seeds, "draws", console=console, transient=True):
            rows += measure(settings, seed, warm_up=seed == settings.seeds[0])
    return Results(sizes=settings.sizes, network=args.network, rows=rows)


def launched(settings: Settings) -> list[Row]:
    """All draws, with a process for every rank.

    Raises:
        ContextParallelError: if a process failed; what it printed says why.
    """
    ranks = settings.sizes.ranks
    with tempfile.TemporaryDirectory(prefix="lightning-cp-bench-") as work:
        job = Path(work) / "job.json"
        job.write_text(json.dumps(settings.as_json()), encoding="ascii")
        codes = run_ranks("lightning_cp.cli.bench.packed.worker", job, ranks, threads=1)
        if any(codes):
            raise ContextParallelError(
                f"the processes ended with exit codes {codes}; what they printed above says why"
            )
        found = [json.loads(result_of(job.parent, rank).read_text()) for rank in range(ranks)]
    return [
        row_of(settings.sizes, seed, name, [of_rank[name] for of_rank in draw])
        for seed, *draw in zip(settings.seeds, *found, strict=True)
        for name in draw[0]
    ]
