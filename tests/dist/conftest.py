"""Fixtures of the tests on several ranks."""

import pytest

from tests._harness.pool import Pool
from tests._harness.renamed import LIGHTNING, OTHER
from tests._harness.rows import Plain, plain_runs

CORE = ("checkpoint", "loaders", "logs", "parity", "predict", "resume")
"""Files whose tests run with both Lightning packages; with the second in `pytest -m full`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of the core the ranks of one package, and of the other."""
    core = metafunc.module.__name__.rpartition(".test_")[2] in CORE
    if core and "pool" in metafunc.fixturenames:
        packages = [LIGHTNING, pytest.param(OTHER, marks=pytest.mark.full)]
        metafunc.parametrize("pool", packages, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is the rest of a grid, with the second package."""
    twice = [item for item in items if sum(1 for _ in item.iter_markers("full")) > 1]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in twice]


@pytest.fixture(scope="session")
def plain(pool: Pool) -> Plain:
    """Runs of the plain Trainer, shared by all files."""
    return plain_runs(pool)
