"""Fixtures that every test may use."""

from collections.abc import Callable, Iterator

import pytest
from torch.nn import functional as F

from lightning_cp.swap import Installation, _torch
from tests._harness import cuda_ops, flash_attn, flash_attn_3_ops, flash_attn_4_functions
from tests._harness.pool import Pool
from tests._harness.renamed import LIGHTNING


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str], Pool]]:
    """Ranks for multi-process tests, by Lightning package; started once, one thread each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        found: dict[str, Pool] = {}

        def of(package: str) -> Pool:
            if package not in found:
                found[package] = Pool(package)
            return found[package]

        yield of
        for ranks in found.values():
            ranks.end()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, pools: Callable[[str], Pool]) -> Pool:
    """Ranks for multi-process tests, those of `lightning` unless a test asks for others."""
    return pools(getattr(request, "param", LIGHTNING))


@pytest.fixture
def cuda_operators() -> Iterator[list[cuda_ops.Call]]:
    """CUDA attention operators take CPU tensors; the calls that torch's own got."""
    versions = flash_attn.installed(), flash_attn_3_ops.installed()
    with versions[0], versions[1], flash_attn_4_functions.installed(), cuda_ops.on_cpu() as calls:
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
