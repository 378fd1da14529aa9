"""The verifier names the module that is wrong on a shard, and has nothing to say of right ones."""

from typing import Any

import pytest

from lightning_cp import verify
from lightning_cp.api import ContextParallel
from lightning_cp.config import Config
from lightning_cp.diagnostics.verify import Report
from lightning_cp.mesh import build_mesh
from lightning_cp.topology import Topology
from tests._harness.faults import FAULTS, Planted
from tests._harness.pool import Pool
from tests._harness.right import RIGHT

pytestmark = pytest.mark.dist


def verified(rank: int, world: int, planted: Planted, layout: str) -> Report:
    """Verify one model; a task of the pool."""
    import torch

    mesh = build_mesh(
        Topology.resolve(world=world, local_world=world, cp=world, dp=1), device=torch.device("cpu")
    )
    parallel = ContextParallel(
        mesh.cp, meta=mesh.meta, rank=rank, world=world, config=Config(layout=layout)
    )
    try:
        return verify(planted.make(), planted.batch(), parallel=parallel, show=False)
    finally:
        parallel.close()
        mesh.close()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_the_faulty_module_is_named(pool: Pool, planted: Planted, world: int, layout: str) -> None:
    for report in pool.run(verified, planted, layout, world=world):
        assert not report.ok
        assert report.finding is not None
        assert report.finding.module == planted.module, report.finding


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("planted", RIGHT, ids=lambda planted: planted.name)
def test_right_models_have_no_finding(
    pool: Pool, planted: Planted, world: int, layout: str
) -> None:
    for report in pool.run(verified, planted, layout, world=world):
        assert report.ok, report.finding
        assert report.compared.attention[0] == report.compared.attention[1] > 0
