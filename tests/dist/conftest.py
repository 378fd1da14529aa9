"""Fixtures of the tests on several ranks."""

import pytest

from tests._harness.pool import Pool
from tests._harness.rows import Plain, plain_runs


@pytest.fixture(scope="session")
def plain(pool: Pool) -> Plain:
    """Runs of the plain Trainer, shared by all files."""
    return plain_runs(pool)
