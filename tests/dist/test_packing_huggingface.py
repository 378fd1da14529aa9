"""Models of transformers on packed rows: ours, and those of its own collate function."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from lightning_cp.data import PackedDataset, Packing, PackingCollate
from lightning_cp.plugin import ContextParallelStrategy
from tests._harness import hf
from tests._harness.grid import rotated
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist

LENGTHS = (9, 1, 5, 17, 30, 2, 8, 24)
CLOSE = 2e-6
"""Models of transformers compute their loss in float32, whatever they are."""


class Model(pl.LightningModule):
    """A causal model that is called with everything that a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.build("llama", use_cache=False)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Corpus(pl.LightningDataModule):
    """Documents of bytes, in rows of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        tokens = hf.TEXT * 2
        starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
        documents = [
            {"input_ids": list(tokens[start : start + length])}
            for start, length in zip(starts, LENGTHS, strict=True)
        ]
        if self.kind == "packed":
            rows = PackedDataset(documents, Packing(32, labels="transformers"))
            return DataLoader(rows, batch_size=None)
        collate: Any = PackingCollate(labels="transformers")
        if self.kind != "collate":
            varlen = self.kind == "flattened with lengths"
            collate = DataCollatorWithFlattening(return_flash_attn_kwargs=varlen)
        return DataLoader(documents, batch_size=4, collate_fn=collate)


def fit(rank: int, world: int, options: Any, kind: str) -> list[float]:
    strategy: Any = "auto" if options is None else ContextParallelStrategy(**options)
    model = Model()
    trainer = pool_trainer(rank, world, strategy, max_epochs=1)
    trainer.fit(model, datamodule=Corpus(kind))
    return model.losses


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    rotated(
        ["packed", "collate", "flattened", "flattened with lengths"],
        [
            (2, {}),
            (3, {"layout": "balanced", "documents": "position_ids"}),
            (2, {"layout": "balanced"}),
        ],
    ),
)
def test_losses_are_those_of_one_device(kind, world, options, pool):
    (alone,) = pool.run(fit, None, kind, world=1)
    assert len(alone) >= 2
    for losses in pool.run(fit, options, kind, world=world):
        assert losses == pytest.approx(alone, abs=CLOSE)


def test_documents_are_kept_apart(pool):
    """The losses are not those of rows in which they see each other."""
    (alone,) = pool.run(fit, None, "packed", world=1)
    mixed = pool.run(fit, {"documents": "none"}, "packed", world=2)[0]
    assert mixed != pytest.approx(alone, abs=1e-3)


def test_other_lengths_than_those_of_the_documents_are_refused(pool):
    failures = pool.failures(fit_with_other_lengths, world=2)
    assert all(x.kind == "RefusedError" for x in failures)
    assert all("are not the edges of this batch's documents" in x.message for x in failures)


def fit_with_other_lengths(rank: int, world: int) -> None:
    fit(rank, world, {"documents": "none"}, "flattened with lengths")
