"""Trainer runs over packed rows: losses of one process, every token once, resuming."""

import functools
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cp.data import PackedDataset, Packing, PackingCollate, TokenDataset
from lightning_cp.plugin import ContextParallelStrategy
from tests._harness.grid import rotated
from tests._harness.packing import ODD, numbered, write
from tests._harness.trainer import pool_trainer, workers_allowed
from tests.test_packing import Stream

pytestmark = pytest.mark.dist

TOTAL, WIDTH, TOKENS, IGNORED = sum(ODD), 8, 20, -100
EXACT = 1e-12


class Reader(pl.LightningModule):
    """One attention layer over packed rows, with and without a mask of its own."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.alone = alone
        self.words = nn.Embedding(TOTAL + 1, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, TOTAL + 1)
        self.double()
        self.losses: list[float] = []
        self.rows: list[list[int]] = []

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.mixed(x).chunk(3, -1))
        seen = own_document(positions) if self.alone else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.out(x + mixed.transpose(1, 2).flatten(2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        logits = self(batch["input_ids"], batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        self.rows.append(batch["input_ids"].flatten().tolist())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def own_document(positions: Tensor) -> Tensor:
    number = (positions == 0).cumsum(-1)
    seen = number[:, :, None] == number[:, None, :]
    return (seen & torch.ones_like(seen).tril())[:, None]


def numbered_from_1() -> list[Tensor]:
    """Documents in which no token is that of a dummy."""
    return [tokens + 1 for tokens in numbered(ODD)]


class Corpus(pl.LightningDataModule):
    """Packed rows of numbered documents, which know nothing of ranks.

    Args:
        kind: what makes the rows.
        workers: of the loader.
        folder: for token files.
        shuffle: another order in every epoch.
    """

    def __init__(self, kind: str, workers: int, folder: Path, shuffle: bool = False) -> None:
        super().__init__()
        self.kind, self.workers, self.folder, self.shuffle = kind, workers, folder, shuffle

    def setup(self, stage: str) -> None:
        documents = numbered_from_1()
        packing = Packing(TOKENS, buffer=6, hold_longer_than=10)
        self.collate: Any = None
        self.rows: Any = None
        if self.kind == "files":
            self.rows = TokenDataset(
                self.folder / "tokens.bin",
                packing,
                index=self.folder / "tokens.idx",
                dtype="uint32",
                shuffle=self.shuffle,
            )
        elif self.kind == "stream":
            self.rows = PackedDataset(Stream(documents), packing)
        elif self.kind == "packed":
            self.rows = PackedDataset(documents, packing, lengths=ODD, shuffle=self.shuffle)
        else:
            self.rows, self.collate = [x for x in documents if len(x) < TOKENS], PackingCollate()

    def train_dataloader(self) -> Any:
        make = functools.partial(
            DataLoader,
            self.rows,
            num_workers=self.workers,
            multiprocessing_context="fork" if self.workers else None,
            persistent_workers=self.workers > 0 and self.kind == "packed",
        )
        return (
            make(batch_size=None)
            if self.collate is None
            else make(collate_fn=self.collate, batch_size=3)
        )


class Found(NamedTuple):
    """What a rank trained on, its losses and parameters."""

    rows: list[list[int]]
    losses: list[float]
    parameters: dict[str, Tensor]
    saved: list[int]


def fit(
    rank: int, world: int, options: Any, data: Corpus, epochs: int = 1, resume: Any = None
) -> Found:
    """Train, and save after every step; a task of the pool."""
    strategy: Any = "auto"
    if options is not None:
        strategy = ContextParallelStrategy(documents="position_ids", **options)
    save = ModelCheckpoint(
        data.folder / "checkpoints", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    more = {} if resume else {"callbacks": [save], "enable_checkpointing": True}
    trainer = pool_trainer(rank, world, strategy, max_epochs=epochs, **more)
    model = Reader(alone=options is None or world == options.get("data_parallel_size", 1))
    with workers_allowed():
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return Found(model.rows, model.losses, dict(model.state_dict()), [trainer.global_step])


def whole(ranks: list[Found]) -> list[list[int]]:
    """The tokens of every row, from the parts of peers; dummies are left out."""
    rows = zip(*(x.rows for x in ranks), strict=True)
    return [sorted(set().union(*parts) - {0}) for parts in rows]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, numbered_from_1())
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "world", "layout", "workers"),
    rotated(
        ["packed", "files", "stream", "collate"],
        [(2, "balanced", 0), (3, "balanced", 1), (2, "zigzag", 2), (3, "per_document_zigzag", 0)],
    ),
)
def test_losses_are_those_of_one_process(kind, world, layout, workers, folder, pool):
    (alone,) = pool.run(fit, None, Corpus(kind, 0, folder), world=1)
    ranks = pool.run(fit, {"layout": layout}, Corpus(kind, workers, folder), world=world)
    assert whole(ranks) == [sorted(row) for row in alone.rows]
    for found in ranks:
        assert found.losses == pytest.approx(alone.losses, abs=EXACT)
        for name, value in alone.parameters.items():
            assert (found.parameters[name] - value).abs().max() <= EXACT
    if kind != "collate":
        assert sorted(chain(*alone.rows)) == list(range(1, TOTAL + 1))


@pytest.mark.parametrize(("kind", "cp"), [("packed", 2), ("files", 2), ("stream", 1)])
def test_devices_have_equally_many_rows_and_every_token_once(kind, cp, folder, pool):
    options = {"data_parallel_size": 2, "context_parallel_size": cp}
    ranks = pool.run(fit, options, Corpus(kind, 1, folder), world=2 * cp)
    devices = [whole(ranks[device * cp : (device + 1) * cp]) for device in range(2)]
    assert len(devices[0]) == len(devices[1])
    assert sorted(chain(*devices[0], *devices[1])) == list(range(1, TOTAL + 1))
    (one,) = {tuple(found.losses) for found in ranks[:cp]}
    assert all(loss == loss for loss in one)


@pytest.mark.parametrize(
    ("kind", "workers", "before", "after"),
    [
        pytest.param("packed", 2, 2, 3, marks=pytest.mark.full),
        ("files", 0, 2, 1),
        pytest.param("stream", 1, 3, 3, marks=pytest.mark.full),
        pytest.param("packed", 0, 2, 2, marks=pytest.mark.full),
        pytest.param("files", 2, 3, 2, marks=pytest.mark.full),
        pytest.param("packed", 1, 1, 3, marks=pytest.mark.full),
        pytest.param("stream", 0, 2, 3, marks=pytest.mark.full),
        pytest.param("files", 1, 1, 2, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_with_the_very_next_row(kind, workers, before, after, folder, pool):
    """At the same and at another number of ranks, in the first and in the second epoch."""
    data = Corpus(kind, workers, folder, shuffle=kind != "stream")
    uninterrupted = pool.run(fit, {}, data, 2, world=before)
    rows, losses = whole(uninterrupted), uninterrupted[0].losses
    half = len(rows) // 2
    epochs = rows[:half], rows[half:]
    assert all(sorted(chain(*epoch)) == list(range(1, TOTAL + 1)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == (kind == "stream")
    for step in (3, half + 2):
        file = folder / "checkpoints" / f"step={step}.ckpt"
        ranks = pool.run(fit, {}, data, 2, file, world=after)
        assert whole(ranks) == rows[step:]
        assert ranks[0].losses == pytest.approx(losses[step:], abs=1e-9)
        assert ranks[0].saved == [len(rows)]


@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_no_samples(world, folder, pool):
    failures = pool.failures(fit_in_batches, folder, world=world)
    assert {failure.kind for failure in failures} == {"ConfigError"}
    assert all("use DataLoader(dataset, batch_size=None)" in x.message for x in failures)


def fit_in_batches(rank: int, world: int, folder: Path) -> None:
    trainer = pool_trainer(rank, world, ContextParallelStrategy(documents="position_ids"))
    rows = PackedDataset(numbered(ODD), TOKENS)
    trainer.fit(Reader(alone=world == 1), DataLoader(rows, batch_size=2))


def test_documents_must_be_declared(folder, pool):
    """Also where rows are cut as they are read, and found wanting there."""
    failures = pool.failures(fit_undeclared, Corpus("files", 1, folder), world=2)
    assert {failure.kind for failure in failures} == {"BatchError"}
    assert all("position_ids start anew within a row" in x.message for x in failures)


def fit_undeclared(rank: int, world: int, data: Corpus) -> None:
    trainer = pool_trainer(rank, world, ContextParallelStrategy())
    with workers_allowed():
        trainer.fit(Reader(alone=False), datamodule=data)


class Whole(Reader):
    """Wants whole batches."""

    sizes: tuple[int, ...] = ()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.sizes += (batch["input_ids"].shape[1],)
        return batch


def fit_whole(rank: int, world: int, data: Corpus) -> tuple[tuple[int, ...], list[list[int]]]:
    strategy = ContextParallelStrategy(documents="position_ids", layout="balanced")
    model = Whole(alone=False)
    pool_trainer(rank, world, strategy, max_epochs=1).fit(model, datamodule=data)
    return model.sizes, model.rows


def test_hooks_that_want_whole_batches_get_whole_rows(folder, pool):
    ranks = pool.run(fit_whole, Corpus("files", 0, folder), world=2)
    rows = [sorted(chain(*parts)) for parts in zip(*map(itemgetter(1), ranks), strict=True)]
    assert ranks[0][0] == ranks[1][0]
    assert (
        sum(ranks[0][0]) == TOTAL == len([*chain(*rows)]) - sum(x[0] == x[1] for x in rows if x[1:])
    )
