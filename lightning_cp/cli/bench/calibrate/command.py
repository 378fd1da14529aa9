"""`lightning-cp bench calibrate`: options, the measurements, and the cost model that is written."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_cp.balance import CostModel
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.calibrate.fit import Sent, Times, fitted
from lightning_cp.cli.bench.calibrate.measure import Sizes, attended, token_seconds
from lightning_cp.cli.bench.calibrate.worker import slowest
from lightning_cp.cli.children import run_ranks
from lightning_cp.cli.outputs import writable_file
from lightning_cp.errors import ContextParallelError

SUMMARY = "fit the cost model of layouts to this machine: attention, linear layers, link (CPU)"
MS = 1e3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for option, default, text in (
        ("--tokens", 4096, "tokens of the longest document"),
        ("--heads", 8, "query heads"),
        ("--head-dim", 64, "size of a head"),
        ("--width", 512, "of the linear layers"),
        ("--matrices", 12, "weights of a layer in matrices of width x width"),
        ("--world", 2, "processes that send each other messages"),
        ("--repeats", 7, "runs of each, of which the quickest counts"),
    ):
        parser.add_argument(option, type=int, default=default, help=text)
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=argparse.SUPPRESS,
        help="key and value heads (default: as many as query heads)",
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the tensors")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the cost model to FILE, for Balanced(cost_file=...) and plan --cost",
    )


def run(args: argparse.Namespace) -> None:
    """Measure, fit, print, write.

    Raises:
        ConfigError: if an option cannot work; nothing was measured.
        ContextParallelError: if a process failed, or the times cannot be fitted.
    """
    sizes = Sizes(
        tokens=args.tokens,
        heads=args.heads,
        kv_heads=getattr(args, "kv_heads", args.heads),
        head_dim=args.head_dim,
        width=args.width,
        matrices=args.matrices,
        dtype=args.dtype,
        world=args.world,
        repeats=args.repeats,
    )
    if args.json is not None:
        writable_file(args.json, option="--json")
    times = Times(attended(sizes), token_seconds(sizes), _sent(sizes))
    cost = fitted(times, key_bytes=sizes.key_bytes)
    console = Console()
    console.print(_times(times, cost))
    console.print(_constants(cost))
    if args.json is not None:
        cost.save(args.json)


def _sent(sizes: Sizes) -> list[Sent]:
    """What the processes measured, the slowest of each size."""
    with tempfile.TemporaryDirectory(prefix="lightning-cp-calibrate-") as work:
        job = Path(work) / "job.json"
        told = {"world": sizes.world, "repeats": sizes.repeats}
        job.write_text(json.dumps(told), encoding="ascii")
        module = "lightning_cp.cli.bench.calibrate.worker"
        codes = run_ranks(module, job, sizes.world, threads=1)
        if any(codes):
            raise ContextParallelError(
                f"the processes ended with exit codes {codes}; what they printed above says why"
            )
        return slowest(job.parent, sizes.world)


def _times(times: Times, cost: CostModel) -> Table:
    """What was measured beside what the fit makes of it."""
    table = Table(title="milliseconds, forward and backward", box=box.SIMPLE)
    for name in ("", "measured", "fitted"):
        table.add_column(name, justify="right" if name else "left")
    for piece in times.attended:
        model = cost.pair * (piece.pairs + cost.tile * piece.keys)
        name = f"{piece.queries} queries, {piece.keys:,.0f} keys each"
        table.add_row(name, f"{MS * piece.seconds:.3f}", f"{MS * model:.3f}")
    for message in times.sent:
        model = message.size / cost.bandwidth + cost.latency
        name = f"message of {message.size:,} bytes"
        table.add_row(name, f"{MS * message.seconds:.3f}", f"{MS * model:.3f}")
    return table


def _constants(cost: CostModel) -> Table:
    table = Table(title="cost model of a layer", box=box.SIMPLE)
    for name in ("", "here", "default"):
        table.add_column(name, justify="right" if name else "left")
    defaults = asdict(CostModel())
    for name, value in asdict(cost).items():
        table.add_row(name, f"{value:.4g}", f"{defaults[name]:.4g}")
    return table
