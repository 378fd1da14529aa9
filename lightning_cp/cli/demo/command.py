"""`lightning-cp demo`, the user's side: options, the two runs as child processes, the report."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from lightning_cp.cli.children import child_environment, single_threads, threads_each
from lightning_cp.cli.demo.data import Windows, source_text
from lightning_cp.cli.demo.job import Job, RankResult
from lightning_cp.cli.demo.report import Report
from lightning_cp.cli.outputs import matplotlib_for, writable_folder
from lightning_cp.errors import ConfigError, ContextParallelError

SUMMARY = "train a small GPT on a group of processes and on one, and compare the two"
SEED = 13


class Options(NamedTuple):
    """The command's options, checked."""

    devices: int
    max_steps: int
    seqlen: int
    out: Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--devices", type=int, default=2, help="processes that share each sequence")
    parser.add_argument("--max-steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--seqlen", type=int, default=8192, help="bytes of text in a sequence")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("lightning-cp-demo"),
        help="folder for demo.png and report.json",
    )


def run(args: argparse.Namespace) -> None:
    """Train twice, print a table, write `report.json` and `demo.png`.

    Raises:
        ConfigError: if an option cannot work, or matplotlib is missing; nothing was trained.
        ContextParallelError: if a run failed; what it printed says why.
    """
    options = checked(args)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="lightning-cp-demo-") as work:
        text = Path(work) / "text.bin"
        content = source_text(options.seqlen * options.max_steps + 1, seed=SEED)
        Windows(content, options.seqlen)
        text.write_bytes(content)
        several = _train(console, options, text, "context_parallel", options.devices)
        single = _train(console, options, text, "auto", 1)
    report = Report(several, single[0])
    console.print()
    report.print(console)
    report.save(options.out / "report.json")
    _draw(report, options.out / "demo.png")
    console.print(
        f"wrote {options.out / 'demo.png'} and {options.out / 'report.json'}", soft_wrap=True
    )


def checked(args: argparse.Namespace) -> Options:
    """The options, after all that can be known to fail before anything trains.

    Raises:
        ConfigError: if an option cannot work, or matplotlib is missing.
    """
    options = Options(args.devices, args.max_steps, args.seqlen, args.out)
    for name, value in zip(("--devices", "--max-steps", "--seqlen"), options[:3], strict=True):
        if value < 1:
            raise ConfigError(f"{name} {value} is less than 1; choose 1 or more, or leave it out")
    matplotlib_for("demo.png")
    writable_folder(options.out, option="--out")
    return options


def _train(
    console: Console, options: Options, text: Path, strategy: str, devices: int
) -> list[RankResult]:
    """Run one job as a child that shares the terminal; what every rank saw."""
    results = text.parent / strategy
    results.mkdir()
    job = Job(
        strategy=strategy,
        devices=devices,
        max_steps=options.max_steps,
        seqlen=options.seqlen,
        seed=SEED,
        text=str(text),
        results=str(results),
    )
    job.save(results / "job.json")
    threads = (threads_each if strategy != "auto" else single_threads)(options.devices)
    many = f"{devices} process{'es' if devices > 1 else ''}"
    each = f"{threads} thread{'s' if threads > 1 else ''}"
    console.print(f"\n[bold]strategy={strategy!r}[/bold]: {many} of {each}", highlight=False)
    command = [sys.executable, "-m", "lightning_cp.cli.demo.worker", str(results / "job.json")]
    done = subprocess.run(command, env=child_environment(threads), check=False)
    if done.returncode != 0:
        raise ContextParallelError(
            f"the run with strategy={strategy!r} on {many} ended with exit code "
            f"{done.returncode}; what it printed above says why"
        )
    return [RankResult.load(results, rank) for rank in range(devices)]


def _draw(report: Report, path: Path) -> None:
    # Needs matplotlib, an extra: everything else of this package works without.
    from lightning_cp.cli.demo.picture import draw

    draw(report, path)
