"""What a run gives back at its end."""

from pathlib import Path

import pytest

from tests._harness import models
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

TASKS = Path("/proc/self/task")


def threads() -> int:
    return len(list(TASKS.iterdir()))


def run_fits(rank: int, world: int, fits: int) -> list[int]:
    """Threads of this process after each of some runs; the garbage of none is collected."""
    found = []
    for _ in range(fits):
        models.fit(rank, world, models.Case(), {})
        found.append(threads())
    return found


@pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")
def test_runs_leave_no_threads_behind(pool: Pool) -> None:
    """A group of gloo has threads, which end with the last reference to it."""
    for found in pool.run(run_fits, 4, world=2):
        assert found[-1] <= found[0], found
