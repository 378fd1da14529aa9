"""Families of models with windows, chunks, soft-caps, sinks and latents, through a plain module."""

import pickle
from functools import cache
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_cp.plugin import ContextParallelStrategy
from tests._harness import hf
from tests._harness.grid import rotated
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist

TOLERANCE = 1e-8
FAMILIES = [name for name in hf.FAMILIES if hf.VERSION > 4 or name not in ("gemma2", "gpt-oss")]


class Found(NamedTuple):
    """What a step gave: its loss, and the gradients; and whole rows of predictions."""

    loss: float
    grads: dict[str, Tensor]
    logits: Tensor


class Lit(pl.LightningModule):
    """A plain module that keeps what its step gave."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: Any = hf.family(name)
        self.loss = float("nan")
        self.grads: dict[str, Tensor] = {}

    def training_step(self, batch: hf.Batch, index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.loss = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = {
            n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None
        }

    def predict_step(self, batch: hf.Batch, index: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batch_of(name: str) -> hf.Batch:
    """Padded rows for those that look both ways."""
    return hf.BOTH["padded-left"].batch() if name == "modernbert" else hf.plain()


def run_family(rank: int, world: int, name: str, options: dict[str, Any]) -> bytes:
    module = Lit(name)
    loader = torch.utils.data.DataLoader([batch_of(name)], batch_size=None)
    with hf.in_double():
        strategy = ContextParallelStrategy(context_parallel_size=world, **options)
        trainer = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true")
        trainer.fit(module, loader)
        logits = trainer.predict(module, loader)
    return pickle.dumps(Found(module.loss, module.grads, logits[0] if rank == 0 else None))


@cache
def alone(name: str) -> Found:
    """The same model, called on whole rows in one process."""
    model: Any = hf.family(name)
    with hf.in_double():
        out = model(**batch_of(name))
        out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Found(out.loss.item(), grads, out.logits.detach())


def assert_equal(ranks: list[Found], expected: Found, batch: hf.Batch) -> None:
    real = batch.get("attention_mask", torch.ones_like(batch["labels"])) != 0
    off = ((ranks[0].logits - expected.logits).abs().amax(-1) * real).max().item()
    assert off < TOLERANCE, f"logits are off by {off}"
    for rank, found in enumerate(ranks):
        assert found.loss == pytest.approx(expected.loss, abs=TOLERANCE), f"loss of rank {rank}"
        for name, grad in expected.grads.items():
            off = (found.grads[name] - grad).abs().max().item()
            assert off < TOLERANCE, f"gradient of {name} on rank {rank} is off by {off}"


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    rotated(FAMILIES, [(2, "auto"), (3, "zigzag"), (1, "auto"), (2, "contiguous")]),
)
def test_families(name: str, world: int, layout: str, pool: Pool) -> None:
    ranks = pool.run(run_family, name, {"layout": layout}, world=world, timeout=100)
    assert_equal([pickle.loads(x) for x in ranks], alone(name), batch_of(name))


def test_what_is_compared_depends_on_windows_and_sinks() -> None:
    """Without them the references above would be others."""
    for name, changed in (
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
    ):
        if name in FAMILIES:
            model: Any = hf.family(name, **changed)
            with hf.in_double(), torch.no_grad():
                assert (
                    abs(model(**batch_of(name)).loss.item() - alone(name).loss) > 1000 * TOLERANCE
                )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "gemma2" else pytest.mark.full) for n in FAMILIES]
)
def test_verify_agrees(name: str, pool: Pool) -> None:
    pool.run(run_family, name, {"verify": "first_batch"}, world=2, timeout=100)
