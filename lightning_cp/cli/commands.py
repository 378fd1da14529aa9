"""What a subcommand is, and how a parser gets a table of them."""

import argparse
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: its summary, what adds its options, and what runs it."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], *, dest: str
) -> None:
    """Let a parser take one of several subcommands; its name ends up in the attribute `dest`."""
    added = parser.add_subparsers(dest=dest, metavar="COMMAND", required=True)
    for name, command in commands.items():
        command.add_options(
            added.add_parser(
                name,
                help=command.summary,
                description=f"{command.summary[:1].upper()}{command.summary[1:]}.",
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
        )
