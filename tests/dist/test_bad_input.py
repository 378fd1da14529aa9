"""Whatever is wrong, every rank ends soon with one clear error, and attention is as it was."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.context import SLOT
from tests._harness.broken import (
    DenseMask,
    Dropout,
    Dying,
    Eager,
    Failing,
    FailingData,
    Idle,
    LocalMean,
    LocalMeanLater,
    NoAttention,
    Predicting,
    Shifting,
    TakingTheIterator,
)
from tests._harness.models import (
    Case,
    LanguageModel,
    Outcome,
    Text,
    fit,
    furthest,
    loaders,
    overridden,
    trainer_of,
)

pytestmark = pytest.mark.dist

USUAL = Case()


def rows(samples: list[Any]) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=2)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> DataLoader[Any]:
    """The usual samples, with one field computed from the tokens."""
    return rows([{**sample, name: change(sample["input_ids"])} for sample in Text(USUAL, 4)])


def with_hole(tokens: Tensor) -> Tensor:
    return (torch.arange(len(tokens)) != 5).long()


NO_SEQUENCE = [{"x": torch.zeros(3), "id": 0}] * 4
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "no-sequence": lambda rank: rows(NO_SEQUENCE),
    "no-sequence-on-one-rank": lambda rank: rows(NO_SEQUENCE if rank else list(Text(USUAL, 4))),
    "unknown-field": lambda rank: changed("scores", torch.zeros_like),
    "short-labels": lambda rank: changed("labels", lambda tokens: tokens[1:]),
    "packed": lambda rank: changed("position_ids", lambda tokens: torch.arange(len(tokens)) % 9),
    "hole-in-padding": lambda rank: changed("attention_mask", with_hole),
    "peers-differ-in-length": lambda rank: rows(list(Text(Case(lengths=(24 - 2 * rank,)), 4))),
    "peers-differ-in-text": lambda rank: rows(list(Text(USUAL, 4, first=rank))),
    "peers-differ-in-number": lambda rank: DataLoader(Text(USUAL, 4 + 2 * rank), batch_size=2),
    "unreadable-on-one-rank": lambda rank: DataLoader(FailingData(USUAL, 6), batch_size=2),
}
"""Training loaders that are not the usual one, by the name of the run."""


class Bad(NamedTuple):
    """A run that must fail: what every rank must raise and say, or a list by rank."""

    name: str
    kind: str | list[str]
    parts: tuple[str, ...] | list[tuple[str, ...]]
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    case: Case = USUAL
    model: type[LanguageModel] = LanguageModel
    stage: str = "fit"
    world: int = 2


def sizes(name: str, parts: tuple[str, ...], world: int = 2, **options: Any) -> Bad:
    return Bad(name, "ConfigError", parts, options, world=world)


def batch(name: str, *parts: str) -> Bad:
    return Bad(name, "BatchError", parts)


def step(name: str, model: type[LanguageModel], *parts: str, case: Case = USUAL) -> Bad:
    return Bad(name, "RefusedError", parts, case=case, model=model)


BOOM = ("rank 1 stopped with ValueError: boom",)
LIST = [
    sizes(
        "cp-larger-than-world",
        ("context_parallel_size=4", "2 processes", "[1, 2]"),
        context_parallel_size=4,
    ),
    sizes("cp-0", ("context_parallel_size=0", "1 or more"), context_parallel_size=0),
    sizes(
        "cp-does-not-divide",
        ("context_parallel_size=2", "3 processes", "[1, 3]"),
        3,
        context_parallel_size=2,
    ),
    sizes(
        "product-is-not-the-world",
        ("2 x", "= 4 ranks", "has 2"),
        context_parallel_size=2,
        data_parallel_size=2,
    ),
    sizes("zero-stage-4", ("zero_stage=4", "or 3 (parameters, too)"), zero_stage=4),
    sizes("unknown-layout", ("layout='spiral'", "per_document_zigzag, zigzag"), layout="spiral"),
    Bad(
        "predict",
        "MismatchError",
        ("values of predictions of one micro-step differ", "predict_gather='none'"),
        model=Predicting,
        stage="predict",
    ),
    batch("no-sequence", "x (2, 3), id (2,)", "sequence_dims={'tokens': 1}", "input_ids"),
    batch(
        "unknown-field",
        "'scores' of shape (2, 24)",
        "sequence_dims={'scores': 1}",
        "{'scores': None}",
    ),
    Bad(
        "tuple-of-different-shapes",
        "BatchError",
        ("ambiguous", "2 (2,)", "sequence_dims={'0': 1}"),
        case=Case(kind="tuple"),
    ),
    batch("short-labels", "different lengths", "'input_ids': 24", "'labels': 23"),
    batch("packed", "position_ids start anew", "documents='none'"),
    batch("hole-in-padding", "attention_mask of row 0", "left and on the right"),
    Bad(
        "no-sequence-on-one-rank",
        ["MismatchError", "BatchError"],
        ("could cut the batch", "rank 1 has no field", "x (2, 3)"),
    ),
    Bad(
        "peers-differ-in-length",
        "MismatchError",
        ("shapes", "rank 0 has input_ids (2, 24)", "rank 1 has input_ids (2, 22)"),
    ),
    Bad(
        "peers-differ-in-text",
        "MismatchError",
        ("contents of the batch", "rank 0 has hash", "rank 1 has hash"),
    ),
    Bad(
        "peers-differ-in-number",
        "MismatchError",
        ("rank 0 has micro-step 0 of train of 2 batches", "rank 1 has micro-step 0 of train of 3"),
    ),
    step(
        "no-attention",
        NoAttention,
        "the root module (NoAttention): no attention call",
        "scaled_dot_product_attention",
    ),
    step(
        "eager",
        Eager,
        "module 'net.blocks.0' (EagerAttention, broken.py",
        "scores of 12 x 12 tokens",
    ),
    step("idle-attention", Idle, "module 'net.blocks.0' (IdleAttention): no attention call"),
    Bad("local-mean", "MismatchError", ("loss", "rank 0 has", "rank 1 has"), model=LocalMean),
    Bad(
        "local-mean-later",
        "MismatchError",
        ("loss of the micro-step before", "rank 1 has"),
        model=LocalMeanLater,
    ),
    step(
        "arange",
        LanguageModel,
        "module 'net' (GPT, models.py",
        "functional.positions(12)",
        case=Case(kind="tensor"),
    ),
    Bad(
        "arange-in-validation",
        "RefusedError",
        ("module 'net' (GPT", "functional.positions"),
        case=Case(kind="tensor"),
        stage="validate",
    ),
    step(
        "shift-inside",
        Shifting,
        "the root module (Shifting",
        "a slice without the last of this rank's 12 tokens, a shift along the sequence",
        "shift in the dataset",
    ),
    step(
        "dense-mask",
        DenseMask,
        "module 'net.blocks.0.attention' (Attention",
        "(2, 1, 12, 12)",
        "is_causal=True",
        case=Case(padding=("left",)),
    ),
    step("attention-dropout", Dropout, "module 'net.blocks.1' (Dropping", "dropout of 0.1"),
    step("iterator", TakingTheIterator, "dataloader_iter"),
    Bad("exception-on-one-rank", ["PeerError", "ValueError"], [BOOM, ("boom",)], model=Failing),
    Bad(
        "exception-on-one-of-three",
        ["PeerError", "ValueError", "PeerError"],
        [BOOM, ("boom",), BOOM],
        model=Failing,
        world=3,
    ),
    Bad(
        "unreadable-on-one-rank",
        ["PeerError", "OSError"],
        [("rank 1 stopped with OSError",), ("no such sample",)],
    ),
    Bad("rank-dies", ["PeerError", "EOFError"], [("another rank",), ("died",)], model=Dying),
]


RUNS = {bad.name: bad for bad in LIST}


def attempt(rank: int, world: int, name: str) -> None:
    """Run it; says so where anything stays installed after the error."""
    bad = RUNS[name]
    try:
        options = {"timeout": timedelta(seconds=3), **bad.options}
        trainer = trainer_of(rank, world, bad.case, options)
        train, val = loaders(bad.case)
        if name in LOADERS:
            train = LOADERS[name](rank)
        both = (train, val) if bad.stage == "fit" else (train,)
        getattr(trainer, bad.stage)(bad.model(bad.case), *both)
    finally:
        assert not overridden()
        assert SLOT.active is None
        assert not SLOT.suspended


def caught(rank: int, world: int, name: str) -> tuple[str, str, str] | None:
    """The error as a value: the processes live on, and the next run needs no new ones."""
    try:
        attempt(rank, world, name)
    except Exception as error:
        return type(error).__name__, str(error), traceback.format_exc()
    return None


def fail_twice(rank: int, world: int, first: str, second: str) -> None:
    """A run that fails on one rank, after one that failed on all, in the same processes."""
    assert caught(rank, world, first) is not None
    attempt(rank, world, second)


def fail_then_fit(rank: int, world: int, name: str) -> Outcome:
    """A run that works, after one that failed, in the same processes."""
    assert caught(rank, world, name) is not None
    return fit(rank, world, USUAL, {})


def check(bad: Bad, found: list[Any]) -> None:
    for rank, failure in enumerate(found):
        assert failure is not None, f"rank {rank} did not fail"
        said_kind, message, trace = failure
        kind = bad.kind if isinstance(bad.kind, str) else bad.kind[rank]
        parts = bad.parts if isinstance(bad.parts, tuple) else bad.parts[rank]
        assert said_kind == kind, f"rank {rank}: {trace}"
        for part in parts:
            assert part in message, f"rank {rank}: {message}"


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_says(name, pool):
    bad = RUNS[name]
    if "PeerError" in bad.kind:
        check(bad, pool.failures(attempt, name, world=bad.world))
    else:
        check(bad, pool.run(caught, name, world=bad.world, timeout=30))


def test_second_failure_is_the_one_that_is_named(pool):
    found = pool.failures(fail_twice, "arange", "exception-on-one-rank", world=2)
    check(RUNS["exception-on-one-rank"], found)


@pytest.mark.parametrize("name", ["arange", "dense-mask", "peers-differ-in-text"])
def test_next_run_works(name, pool):
    (plain,) = pool.run(fit, USUAL, world=1)
    for found in pool.run(fail_then_fit, name, world=2):
        assert max(furthest(found, plain).values()) <= 1e-6
