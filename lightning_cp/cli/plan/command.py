"""`lightning-cp plan`: what every layout makes of a row of documents, before anything runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_cp.balance import Balanced, CostModel, Work, work_of
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.outputs import check_outputs
from lightning_cp.cli.plan.documents import Wanted, first_row, lengths_of
from lightning_cp.cli.plan.figures import NAMES, Answer, Question, judged, save
from lightning_cp.cli.plan.model import RULE, Model, Verdict
from lightning_cp.data.packing.files import DTYPES as TOKENS
from lightning_cp.errors import ConfigError
from lightning_cp.mask import Visibility

SUMMARY = "show what each layout gives the ranks for documents of given lengths"
PICTURE = "plan.png"
SIZES = (
    ("heads", 32, "query heads"),
    ("kv_heads", 8, "key and value heads"),
    ("head_dim", 128, "size of a head"),
    ("layers", 32, "layers, for the memory"),
    ("hidden", 4096, "width between layers"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens of every document of a row: numbers with spaces or commas between them",
    )
    rows.add_argument(
        "--dataset",
        metavar="DATA",
        help="a row of the first documents of a dataset: a folder (a file is a document, a byte a "
        "token), a file of tokens, or module:name in Python",
    )
    parser.add_argument(
        "--token-dtype", choices=sorted(TOKENS), default="uint16", help="of a file of tokens"
    )
    parser.add_argument(
        "--end", type=int, metavar="TOKEN", help="ends every document in a file of tokens"
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share the row")
    parser.add_argument(
        "--layout",
        action="append",
        choices=NAMES,
        default=argparse.SUPPRESS,
        help="a layout to show; may be given again (default: each)",
    )
    for option, default, text in (
        ("--work-cap", Balanced.work_cap, "most work of a rank over its share, for balanced"),
        ("--token-cap", Balanced.token_cap, "most tokens of a rank over its share"),
    ):
        parser.add_argument(option, type=float, default=default, help=text)
    for option, size, text in (
        ("--align", Balanced.align, "documents are cut at multiples of this"),
        ("--min-piece", Balanced.min_piece, "shortest piece of a document that is cut"),
        ("--tokens", 65536, "tokens of a row of --dataset"),
        *((f"--{name.replace('_', '-')}", size, text) for name, size, text in SIZES),
    ):
        parser.add_argument(option, type=int, default=size, help=text)
    parser.add_argument(
        "--window", type=int, metavar="LEFT", help="keys before its own that a query sees"
    )
    parser.add_argument(
        "--chunk", type=int, metavar="SIZE", help="positions of a document that see each other"
    )
    parser.add_argument(
        "--prefix", type=int, default=0, metavar="SIZE", help="first positions that see each other"
    )
    parser.add_argument("--bidirectional", action="store_true", help="attention is not causal")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of the model")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="a cost model, for the times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"draw {PICTURE} in DIR")


def run(args: argparse.Namespace) -> None:
    """Lay the row out, print a table, write what was asked for.

    Raises:
        ConfigError: if an option cannot work.
    """
    question = asked(args)
    console = Console()
    answers = [question.answer(name) for name in getattr(args, "layout", NAMES)]
    _print(console, answers)
    found = judged(question, answers)
    quickest = next(answer for answer in answers if answer.name == found.layout)
    console.print(f"attention: peak of one call; {RULE}", soft_wrap=True)
    console.print(_sentence(found, question, max(quickest.loads.tokens)), soft_wrap=True)
    if args.json is not None:
        save(args.json, question, answers)
    if args.out is not None:
        # Needs matplotlib, an extra: everything else of this package works without.
        from lightning_cp.cli.plan.picture import draw

        draw(answers, args.out / PICTURE)


def asked(args: argparse.Namespace) -> Question:
    """What is asked, after all that can be known to fail.

    Raises:
        ConfigError: if an option cannot work.
    """
    for option in ("ranks", *(name for name, _, _ in SIZES)):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} {getattr(args, option)} must be at least 1")
    work = _work(args)
    check_outputs(args, PICTURE)
    model = Model(dtype=args.dtype, **{name: getattr(args, name) for name, _, _ in SIZES})
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"--heads {model.heads} is no multiple of --kv-heads {model.kv_heads}; every key head "
            f"has equally many query heads"
        )
    return Question(
        lengths=_lengths(args),
        ranks=args.ranks,
        options=Balanced(
            work_cap=args.work_cap,
            token_cap=args.token_cap,
            align=args.align,
            min_piece=args.min_piece,
        ),
        work=work,
        model=model,
        cost=model.cost if args.cost is None else CostModel.load(args.cost),
    )


def _work(args: argparse.Namespace) -> Work:
    """What attention costs."""
    for name, least in (("window", 0), ("chunk", 1), ("prefix", 0)):
        number = getattr(args, name)
        if number is not None and number < least:
            raise ConfigError(f"--{name} {number} must be at least {least}, a number of tokens")
    if args.prefix and args.bidirectional:
        raise ConfigError(
            f"--prefix {args.prefix} has no effect with --bidirectional: all positions see each "
            f"other then; leave one of them out"
        )
    window = None if args.window is None else (args.window, None)
    prefix = (args.prefix,) if args.prefix else None
    return work_of(Visibility(not args.bidirectional, window, args.chunk, prefix))


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    if args.lengths is not None:
        return lengths_of(args.lengths)
    return first_row(Wanted(args.dataset, args.tokens, args.token_dtype, args.end))


def _print(console: Console, answers: Sequence[Answer]) -> None:
    question = answers[0].question
    table = Table(
        title=f"{question.problem.tokens} tokens in {len(question.lengths)} documents on "
        f"{question.ranks} ranks; one layer, times from the cost model"
    )
    for column in (
        "layout", "rank", "tokens", "/ share", "work / share", "keys received", "MB received",
        "pieces", "compute ms", "link ms", "attention MB", "activations MB",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "layout" else "right")
    for answer in answers:
        ranks = answer.ranks()
        for row in ranks:
            table.add_row(
                answer.name if row["rank"] == 0 else "",
                str(row["rank"]),
                str(row["tokens"]),
                f"{row['tokens_over_share']:.3f}",
                f"{row['work_over_share']:.3f}",
                str(row["keys_received"]),
                f"{row['bytes_received'] / 1e6:.1f}",
                str(row["fragments"]),
                f"{row['compute_ms']:.3f}",
                f"{row['link_ms']:.3f}",
                f"{row['attention_bytes'] / 1e6:.1f}",
                f"{row['activation_bytes'] / 1e6:.1f}",
                end_section=row is ranks[-1],
            )
    console.print(table)


def _sentence(found: Verdict, question: Question, tokens: int) -> str:
    """Whether cutting pays, with the figures; `tokens` of the busiest rank where it is done."""
    cut, whole = (question.model.activations(n) / 1e9 for n in (tokens, found.whole_tokens))
    pays = "pays" if found.pays else "does not pay, but for memory"
    return (
        f"Context parallelism {pays}: {found.layout} takes {1e3 * found.seconds:.3f} ms a layer, "
        f"whole documents dealt out to the same ranks {1e3 * found.whole_seconds:.3f} ms (ratio "
        f"{found.whole_seconds / found.seconds:.2f}); the longest of {found.longest} tokens; "
        f"activations of the busiest rank {cut:.2f} GB, with whole documents {whole:.2f} GB."
    )
