"""What a layout gives the ranks of a row, and what it costs: pure functions but for the clock."""

from dataclasses import dataclass
from statistics import fmean
from time import thread_time

from lightning_cp.balance import (
    Balanced,
    Causal,
    Loads,
    Problem,
    layout_of,
    least_received,
    loads,
    pieces_of,
    plan,
)
from lightning_cp.cli.bench.balance.rows import Setting, row

LAYOUTS: dict[str, str | Balanced] = {
    "contiguous": "contiguous",
    "zigzag": "zigzag",
    "per_document_zigzag": "per_document_zigzag",
    "balanced": Balanced(),
    "balanced_exact": Balanced(align=1, min_piece=1),
}
"""By the name in the results; "balanced" has its defaults, "balanced_exact" cuts anywhere."""

BASELINE = "per_document_zigzag"

PAIRS_PER_TOKEN, PAIRS_PER_KEY = 16384, 702
"""What the linear layers of a token, and a received key, take in the time of so many pairs."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One row under one layout.

    Attributes:
        work: greatest work of a rank over the mean.
        tokens: greatest number of tokens of a rank over the mean.
        received: keys that all ranks together receive.
        fragments: pieces of documents, summed over ranks.
        bound: keys that any layout within the default caps makes the ranks receive.
        alone: modelled time of the slowest rank over the mean time of computing, when messages
            travel before tiles are computed.
        overlapped: the same when all of them travel meanwhile.
        plan_ms: CPU time of making the layout, milliseconds.
    """

    work: float
    tokens: float
    received: int
    fragments: int
    bound: int
    alone: float
    overlapped: float
    plan_ms: float


def measure(seed: int, setting: Setting, name: str) -> Draw:
    """Lay out the row of a seed."""
    lengths, ranks = row(seed, setting.tokens), setting.ranks
    caps = (Balanced().work_cap, Balanced().token_cap)
    problem = Problem(lengths, Causal(), (1 / ranks,) * ranks, caps)
    plan.cache_clear()
    start = thread_time()
    layout = layout_of(LAYOUTS[name], lengths, ranks)
    seconds = thread_time() - start
    found = loads(problem, pieces_of(layout, lengths))
    alone, overlapped = makespans(found)
    return Draw(
        work=max(found.work) / fmean(found.work),
        tokens=max(found.tokens) / fmean(found.tokens),
        received=sum(found.received),
        fragments=sum(found.fragments),
        bound=least_received(problem),
        alone=alone,
        overlapped=overlapped,
        plan_ms=1e3 * seconds,
    )


def makespans(found: Loads) -> tuple[float, float]:
    """Time of the slowest rank over the mean of computing, without and with overlap."""
    pairs = zip(found.work, found.tokens, strict=True)
    compute = [work + PAIRS_PER_TOKEN * tokens for work, tokens in pairs]
    link = [PAIRS_PER_KEY * keys for keys in found.received]
    times = list(zip(compute, link, strict=True))
    mean = fmean(compute)
    return max(map(sum, times)) / mean, max(map(max, times)) / mean
