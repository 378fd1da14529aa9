"""The verifier names the module that is wrong on a shard, and has nothing to say of right ones."""

from typing import Any

import pytest
import torch

from lightning_cp import verify
from lightning_cp.diagnostics.verify import Report
from tests._harness.faults import FAULTS, Planted
from tests._harness.grid import named, rotated
from tests._harness.group import one_group
from tests._harness.hf import build
from tests._harness.pool import Pool
from tests._harness.right import RIGHT

pytestmark = pytest.mark.dist

LENGTH = 37
WAYS = [(world, layout) for world in (2, 3) for layout in ("contiguous", "zigzag")]


def verified(rank: int, world: int, planted: Planted, layout: str) -> Report:
    """Verify one model; a task of the pool."""
    with one_group(rank, world, layout=layout) as parallel:
        return verify(planted.make(), planted.batch(), parallel=parallel, show=False)


@pytest.mark.parametrize(("planted", "world", "layout"), rotated(FAULTS, WAYS), ids=named)
def test_the_faulty_module_is_named(pool: Pool, planted: Planted, world: int, layout: str) -> None:
    for report in pool.run(verified, planted, layout, world=world):
        assert not report.ok
        assert report.finding is not None
        assert report.finding.module == planted.module, report.finding


@pytest.mark.parametrize(("planted", "world", "layout"), rotated(RIGHT, WAYS), ids=named)
def test_right_models_have_no_finding(
    pool: Pool, planted: Planted, world: int, layout: str
) -> None:
    for report in pool.run(verified, planted, layout, world=world):
        assert report.ok, report.finding
        assert report.compared.attention[0] == report.compared.attention[1] > 0


def rows(kind: str) -> dict[str, Any]:
    """Tokens and labels for a model of transformers; padded on both sides, packed, or plain."""
    tokens = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, :5], mask[1, -9:] = 0, 0
        batch |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    if kind == "packed":
        starts = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)])
        batch |= {"position_ids": starts.expand(2, -1).contiguous(), "use_cache": False}
    return batch


def pretrained(rank: int, world: int, name: str, kind: str) -> Report:
    """Verify a model of transformers; a task of the pool."""
    with one_group(rank, world) as parallel:
        return verify(build(name), rows(kind), parallel=parallel, show=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "plain"),
        pytest.param("llama", "padded", marks=pytest.mark.full),
        ("llama", "packed"),
        ("qwen3", "padded"),
        ("gpt2", "padded"),
        ("bert", "padded"),
    ],
)
def test_models_of_transformers_have_no_finding(pool: Pool, name: str, kind: str) -> None:
    for report in pool.run(pretrained, name, kind, world=3):
        assert report.ok, report.finding
        assert report.compared.attention == (2, 2)
        assert report.compared.output < 1, "also where inputs have other shapes"
