"""`lightning-cp bench`: one benchmark per entry of `BENCHMARKS`."""

import argparse

from lightning_cp.cli.bench.attention import command as attention
from lightning_cp.cli.bench.balance import command as balance
from lightning_cp.cli.bench.fuzz import command as fuzz
from lightning_cp.cli.commands import Command, add_commands

SUMMARY = "measure on this machine"

BENCHMARKS = {
    "attention": Command(attention.SUMMARY, attention.add_options, attention.run),
    "balance": Command(balance.SUMMARY, balance.add_options, balance.run),
    "fuzz": Command(fuzz.SUMMARY, fuzz.add_options, fuzz.run),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks as subcommands."""
    add_commands(parser, BENCHMARKS, dest="benchmark")


def run(args: argparse.Namespace) -> None:
    """Run one benchmark.

    Raises:
        ContextParallelError: if it could not do what it was asked for.
    """
    BENCHMARKS[args.benchmark].run(args)
