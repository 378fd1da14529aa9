"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest

from tests._harness import cuda_ops
from tests._harness.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks for multi-process tests, started once per session; one thread each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        ranks = Pool()
        yield ranks
        ranks.end()


@pytest.fixture
def cuda_operators() -> Iterator[list[cuda_ops.Call]]:
    """Torch's CUDA attention operators take CPU tensors; the calls that they got."""
    with cuda_ops.on_cpu() as calls:
        yield calls
