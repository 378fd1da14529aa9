"""From the times of ranks to figures: pure functions of numbers.

Legend: a list `[rank][run]` holds one number for every rank and every run, in seconds. The runs of
the ideal (A) and of the executor (B) alternate, A B A B ... A: the ideal has one run more.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

Times = Sequence[Sequence[float]]
"""`[rank][run]`."""

KERNEL = "kernel"


class Spread(NamedTuple):
    """A median over launches, with the least and the greatest launch."""

    median: float
    least: float
    greatest: float


def slowest(times: Times) -> list[float]:
    """For every run its time on the slowest rank."""
    return [max(run) for run in zip(*times, strict=True)]


def efficiency(ideal: Times, real: Times) -> float:
    """Median over pairs of one launch of the ideal's time over the executor's, slowest ranks.

    A pair is a run of the ideal and the executor's run that follows it.
    """
    pairs = zip(slowest(ideal)[:-1], slowest(real), strict=True)
    return median(a / b for a, b in pairs)


def repeatability(ideal: Times) -> float:
    """Median over one launch of the ideal's time over its time in the next run: 1 but for noise."""
    runs = slowest(ideal)
    return median(a / b for a, b in pairwise(runs))


def spread(launches: Sequence[float]) -> Spread:
    """Over launches."""
    return Spread(median(launches), min(launches), max(launches))


def typical(launches: Sequence[Times]) -> float:
    """Median over launches of the median over runs of the slowest rank's time."""
    return median(median(slowest(times)) for times in launches)


def busiest(ranks: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The phases of the rank whose phases add up to most."""
    return max(ranks, key=lambda phases: sum(phases.values()))


def nonkernel_fraction(phases: Mapping[str, float]) -> float:
    """Time of all phases but the kernel over that of the kernel."""
    kernel = phases[KERNEL]
    return (sum(phases.values()) - kernel) / kernel


def median_phases(launches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Phase by phase the median over launches; a phase that a launch lacks counts as 0."""
    names = dict.fromkeys(name for phases in launches for name in phases)
    return {name: median(phases.get(name, 0.0) for phases in launches) for name in names}
