"""`lightning-cp bench fuzz`: options, the loop, and what it found."""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_cp.cli.bench.fuzz.cases import Case, draw
from lightning_cp.cli.bench.fuzz.check import check
from lightning_cp.cli.outputs import writable_file
from lightning_cp.errors import ConfigError, ContextParallelError

SUMMARY = "compare attention of random groups, masks and layouts with plain maths, in one process"

SHOWN = 5
"""How many findings are printed in full."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--cases", type=int, default=1000, help="how many calls")
    parser.add_argument("--seed", type=int, default=0, help="of the calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--max-tokens", type=int, default=64, help="greatest length of a row")
    parser.add_argument("--max-ranks", type=int, default=8, help="greatest size of a group")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and findings")


def run(args: argparse.Namespace) -> None:
    """Make the calls and report those that are wrong.

    Raises:
        ConfigError: if an option cannot work.
        ContextParallelError: if a call is wrong; what was printed says which and how.
    """
    for option in ("cases", "max_tokens", "max_ranks"):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} {getattr(args, option)} must be at least 1")
    if args.json is not None:
        writable_file(args.json, option="--json")
    console = Console()
    counts: Counter[str] = Counter()
    findings: list[tuple[Case, str]] = []
    numbers = range(args.first, args.first + args.cases)
    for number in track(numbers, "calls", console=console, transient=True):
        case = draw(number, seed=args.seed, most_tokens=args.max_tokens, most_ranks=args.max_ranks)
        counts.update(_kinds(case))
        wrong = check(case)
        if wrong is not None:
            findings.append((case, wrong))
    _report(console, counts, findings, args)


def _kinds(case: Case) -> list[str]:
    mask = case.mask
    kinds = [f"exchange {case.exchange}", f"ranks {case.world}", f"dtype {case.dtype}"]
    kinds += [f"kernel {case.kernel}", "causal" if mask.is_causal else "not causal"]
    for name in ("documents", "keys", "window", "chunk", "prefix"):
        if getattr(mask, name) is not None:
            kinds.append({"keys": "padding"}.get(name, name))
    kinds += [f"with {name}" for name in case.terms.names]
    if case.dims[0] != case.dims[1]:
        kinds.append("keys and values of two sizes")
    if case.heads[0] != case.heads[1]:
        kinds.append("grouped queries")
    return kinds


def _report(
    console: Console,
    counts: Counter[str],
    findings: list[tuple[Case, str]],
    args: argparse.Namespace,
) -> None:
    table = Table("kind", "calls", title=f"{args.cases} calls, {len(findings)} wrong")
    for kind, count in sorted(counts.items()):
        table.add_row(kind, str(count))
    console.print(table)
    for case, wrong in findings[:SHOWN]:
        console.print(f"call {case.number}: {wrong}\n  {case}", markup=False, highlight=False)
    if args.json is not None:
        content = {
            "cases": args.cases,
            "seed": args.seed,
            "failures": len(findings),
            "kinds": dict(sorted(counts.items())),
            "findings": [
                {"wrong": wrong, "exchange": case.exchange, **asdict(case)}
                for case, wrong in findings
            ],
        }
        args.json.write_text(json.dumps(content, indent=2), encoding="utf-8")
    if findings:
        first = findings[0][0].number
        raise ContextParallelError(
            f"{len(findings)} of {args.cases} calls are wrong; repeat the first alone with "
            f"--seed {args.seed} --first {first} --cases 1"
        )
