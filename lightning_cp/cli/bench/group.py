"""`lightning-cp bench`: one benchmark per entry of `BENCHMARKS`."""

import argparse

from lightning_cp.cli.bench.attention import command as attention
from lightning_cp.cli.bench.balance import command as balance
from lightning_cp.cli.bench.calibrate import command as calibrate
from lightning_cp.cli.bench.fuzz import command as fuzz
from lightning_cp.cli.bench.overlap import command as overlap
from lightning_cp.cli.bench.packed import command as packed
from lightning_cp.cli.commands import Command, add_commands

SUMMARY = "measure on this machine"

BENCHMARKS = {
    "attention": Command(attention.SUMMARY, attention.add_options, attention.run),
    "balance": Command(balance.SUMMARY, balance.add_options, balance.run),
    "calibrate": Command(calibrate.SUMMARY, calibrate.add_options, calibrate.run),
    "fuzz": Command(fuzz.SUMMARY, fuzz.add_options, fuzz.run),
    "overlap": Command(overlap.SUMMARY, overlap.add_options, overlap.run),
    "packed": Command(packed.SUMMARY, packed.add_options, packed.run),
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
