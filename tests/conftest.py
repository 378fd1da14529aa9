"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest

from tests._harness.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks for multi-process tests, started once per session."""
    ranks = Pool()
    yield ranks
    ranks.close()
