"""Entry point of `lightning-cp`: one subcommand per entry of `COMMANDS`."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import override

from lightning_cp import __version__
from lightning_cp.cli.bench import group as bench
from lightning_cp.cli.commands import Command, add_commands
from lightning_cp.cli.demo import command as demo
from lightning_cp.cli.plan import command as plan
from lightning_cp.cli.verify import command as verify
from lightning_cp.errors import ContextParallelError, VerificationError

FAILED = 2
"""Exit code of a command that could not do what it was asked for."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


COMMANDS = {
    "bench": Command(bench.SUMMARY, bench.add_options, bench.run),
    "demo": Command(demo.SUMMARY, demo.add_options, demo.run),
    "plan": Command(plan.SUMMARY, plan.add_options, plan.run),
    "verify": Command(verify.SUMMARY, verify.add_options, verify.run),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name, those of this process where not given.

    Returns:
        The exit code: 0; 1 where `verify` found a difference; 2 after another error of this
        package. Both are printed in one line.

    Raises:
        SystemExit: after `--help` and `--version` (0), and for arguments that cannot be parsed (2).
    """
    args = _parser().parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
    except VerificationError as error:
        print(f"different: {error}", file=sys.stderr)
        return verify.DIFFERENT
    except ContextParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lightning-cp", description="Context parallelism for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser, COMMANDS, dest="command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
