"""One row of the feature table, and the usual ways to write it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tests._harness.feature_runs import Place, Run, fitted

SHARDED = {"zero_stage": 3}
FOUR = {"context_parallel_size": 2}


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
        name: what it is.
        how: how it was used, what was seen; the note of the table.
        expectation: "works": the outcome of the run is that of the plain Trainer; "refused": the
            run ends with `message` on every rank.
        check: the run; what it returns is compared.
        message: regular expression for the error.
        tolerance: largest difference of a number, relative above 1.
        world: number of ranks.
        options: of the strategy.
        plain: devices of the plain Trainer; 0: the run checks by itself and is compared to nothing.
    """

    name: str
    how: str
    expectation: Literal["works", "refused"]
    check: Run
    message: str = ""
    tolerance: float = 1e-10
    world: int = 2
    options: Mapping[str, Any] = {}
    plain: int = 1


def works(name: str, how: str, check: Run, **more: Any) -> Feature:
    """A feature that gives what it gives on one device."""
    return Feature(name, how, "works", check, **more)


def refused(name: str, how: str, check: Run, message: str, **more: Any) -> Feature:
    """A feature that stops the run with a message."""
    return Feature(name, how, "refused", check, message, **more)


def option(
    name: str, how: str = "", *, also: Mapping[str, Any] | None = None, **given: Any
) -> Feature:
    """An option of the Trainer that works in `fit`."""
    shown = ", ".join(f"`{key}={value!r}`" for key, value in given.items())
    return works(name, shown + (f"; {how}" if how else ""), fitted(**given, **(also or {})))


def with_callback(name: str, how: str, make: Callable[[Place], Any], **more: Any) -> Feature:
    """A callback that works in `fit`."""
    return works(name, how, fitted(callbacks=lambda place: [make(place)], **more))
