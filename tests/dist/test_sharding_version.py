"""A torch that cannot shard parameters as they are used here."""

import pytest

from lightning_cp import fsdp
from tests._harness.models import Case, LanguageModel, fit
from tests._harness.pool import Pool
from tests._harness.sharded import SHARDED

pytestmark = pytest.mark.dist


def fit_with_old_torch(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "can_reduce_unused", lambda: False)
        fit(rank, world, Case(), SHARDED, LanguageModel)


def test_an_old_torch_is_refused_before_anything_is_sharded(pool: Pool) -> None:
    for failure in pool.failures(fit_with_old_torch, world=2):
        assert failure.kind == "ConfigError"
        assert "sharded parameters: torch 2." in failure.message
        assert "use zero_stage=0, or a torch that has FSDPModule." in failure.message
