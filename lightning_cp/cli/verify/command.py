"""`lightning-cp verify`, the user's side: options, the ranks as child processes, the exit code."""

import argparse
import json
import re
import tempfile
from pathlib import Path

from lightning_cp.cli.children import run_ranks, threads_each
from lightning_cp.cli.verify.job import Job
from lightning_cp.cli.verify.settings import Settings
from lightning_cp.config import CHOICES, WHOLE, SequenceDim
from lightning_cp.errors import ConfigError, ContextParallelError, VerificationError
from lightning_cp.verification import MAX_TOKENS

SUMMARY = "compare a step of a model with and without context parallelism, module by module"
PLACE = re.compile(rf"((?P<sequence>[^:]+):)?(?P<dim>-?\d+)|(?P<kept>[^:]+):(?P<of>-?\d+):{WHOLE}")
"""What may be said of a field: DIM, SEQUENCE:DIM, or SEQUENCE:DIM:whole."""
CHOSEN = ("layout", "exchange", "documents")
"""Options of the strategy that the command line has, too."""
DIFFERENT = 1
"""Exit code of a rank that found a difference."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FILE.py:FUNCTION",
        default=argparse.SUPPRESS,
        help="a function without arguments that returns a module and a whole batch",
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="in place of the function, a configuration of LightningCLI: its model, the first "
        "training batch of its data, and the options of its strategy",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=argparse.SUPPRESS,
        help="processes that share each sequence (default: what the configuration says, else 2)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="tokens of a row that are used"
    )
    parser.add_argument("--seed", type=int, default=13, help="seed of the parameters and the batch")
    for name in CHOSEN:
        parser.add_argument(
            f"--{name}",
            choices=CHOICES[name],
            default=argparse.SUPPRESS,
            help=f"the strategy's {name} (default: what the configuration says, else auto)",
        )
    parser.add_argument(
        "--sequence-dim",
        action="append",
        metavar="NAME=DIM",
        default=[],
        help="sequence dimension of a field of the batch, or NAME=SEQUENCE:DIM where it holds "
        "several, and NAME=SEQUENCE:DIM:whole where every rank keeps it; may be given again",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")


def run(args: argparse.Namespace) -> None:
    """Start the ranks, let the first one print its table, and fail where something differs.

    Raises:
        ConfigError: if an option cannot work.
        VerificationError: if the step differs with context parallelism.
        ContextParallelError: if a rank failed; what it printed says why.
    """
    config = check(args)
    ranks = getattr(args, "ranks", 2 if config is None else config.ranks)
    dims = _dims(args.sequence_dim)
    with tempfile.TemporaryDirectory(prefix="lightning-cp-verify-") as work:
        job = Job(
            target=getattr(args, "target", None),
            config=None if config is None else config.file,
            ranks=ranks,
            max_tokens=args.max_tokens,
            seed=args.seed,
            options={
                **{name: getattr(args, name) for name in CHOSEN if hasattr(args, name)},
                **({"sequence_dims": dims} if dims else {}),
            },
            result=str(Path(work) / "result.json"),
        )
        job.save(Path(work) / "job.json")
        codes = run_ranks(
            "lightning_cp.cli.verify.worker",
            Path(work) / "job.json",
            ranks,
            threads=threads_each(ranks),
        )
        result = Path(job.result)
        if set(codes) - {0, DIFFERENT} or not result.exists():
            raise ContextParallelError(
                f"the ranks ended with exit codes {codes}; what they printed above says why"
            )
        found = json.loads(result.read_text(encoding="utf-8"))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if found["finding"] is not None:
        raise VerificationError(found["finding"]["text"])


def check(args: argparse.Namespace) -> Settings | None:
    """Refuse what cannot work before a process is started.

    Returns:
        The configuration, where there is one.

    Raises:
        ConfigError: with the option and the way out.
    """
    if hasattr(args, "target") == hasattr(args, "config"):
        raise ConfigError("write FILE.py:FUNCTION or --config FILE.yaml, one of the two")
    config = Settings(args.config) if hasattr(args, "config") else None
    if config is None:
        _check_target(args.target)
    ranks = getattr(args, "ranks", 2)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks} is less than 2, so there is nothing to compare")
    if config is not None and not hasattr(args, "ranks") and config.ranks < 2:
        raise ConfigError(
            f"context_parallel_size={config.ranks} of {config.file!r} is less than 2, so there is "
            f"nothing to compare; choose a number with --ranks"
        )
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens} is less than 1; choose 1 or more")
    return config


def _check_target(target: str) -> None:
    file, _, function = target.rpartition(":")
    if not file or not function.isidentifier():
        raise ConfigError(
            f"{target!r} names no function; write FILE.py:FUNCTION, a function that returns "
            f"a module and a batch"
        )
    if not Path(file).is_file():
        raise ConfigError(f"there is no file {file!r}; write the path of a Python file")


def _dims(given: list[str]) -> dict[str, SequenceDim]:
    found: dict[str, SequenceDim] = {}
    for text in given:
        name, _, said = text.rpartition("=")
        form = PLACE.fullmatch(said)
        if not name or form is None:
            raise ConfigError(
                f"--sequence-dim {text!r} is not NAME=DIM; write for example tokens=1, or "
                f"tokens=target:1 where a batch holds several sequences"
            )
        if form["kept"]:
            found[name] = form["kept"], int(form["of"]), WHOLE
        else:
            dim = int(form["dim"])
            found[name] = (form["sequence"], dim) if form["sequence"] else dim
    return found
