"""Cuts on multiples of a power of two, as coarse as a condition allows."""

from collections.abc import Callable


def round_up(at: int, align: int, allowed: Callable[[int], bool]) -> int:
    """The least multiple of `align`, or else of its half, ..., from `at` that is allowed."""
    while align > 1:
        rounded = at + -at % align
        if rounded == at or allowed(rounded):
            return rounded
        align //= 2
    return at


def round_down(at: int, align: int, allowed: Callable[[int], bool]) -> int:
    """The greatest multiple of `align`, or else of its half, ..., up to `at` that is allowed."""
    while align > 1:
        rounded = at - at % align
        if rounded == at or allowed(rounded):
            return rounded
        align //= 2
    return at
