"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest
from torch.nn import functional as F

from lightning_cp.swap import Installation, _torch
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


@pytest.fixture
def installation() -> Iterator[Installation]:
    """Everything is swapped; nothing of it is left behind."""
    before = F.multi_head_attention_forward
    found = Installation()
    yield found
    found.remove()
    assert F.multi_head_attention_forward is before
    assert not any(
        _torch.has_override(name, key) for name in _torch.OPERATORS for key in _torch.keys("cpu")
    )
