"""Steps and Trainer runs with layouts that place documents equal those of one process."""

import pickle
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelCollate
from lightning_cp.balance import Balanced
from lightning_cp.errors import BatchError, ConfigError, MismatchError
from lightning_cp.plan import quickest
from lightning_cp.plugin import ContextParallelStrategy
from tests._harness.grid import rotated
from tests._harness.group import grads_of, one_group
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer, workers_allowed

pytestmark = pytest.mark.dist

WIDTH, WORDS = 8, 11
ROWS = ((13, 1, 1, 22, 5), (40,), (1, 2), (1,) * 9, (30, 3, 9))
EXACT = 1e-12
Batch = dict[str, Tensor]


class Model(pl.LightningModule):
    """One attention layer over packed rows, with and without a mask of its own."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.alone = alone
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)
        self.double()
        self.losses: list[float] = []

    def forward(self, batch: Batch) -> Tensor:
        x = self.words(batch["input_ids"])
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mixed(x).chunk(3, -1)
        )
        if self.alone:
            seen = own_document(batch["position_ids"])
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + mixed.transpose(1, 2).flatten(2))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def own_document(positions: Tensor) -> Tensor:
    number = (positions == 0).cumsum(-1)
    seen = number[:, :, None] == number[:, None, :]
    return (seen & torch.ones_like(seen).tril())[:, None]


def batch_of(lengths: tuple[int, ...], rows: int = 1) -> Batch:
    dice = torch.Generator().manual_seed(sum(lengths))
    size = (rows, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1)
    return {
        "input_ids": torch.randint(WORDS, size, generator=dice),
        "labels": torch.randint(WORDS, size, generator=dice),
        "position_ids": positions.clone(),
    }


def run_steps(rank: int, world: int, layout: str | Balanced, rows: int) -> bytes:
    """Loss, logits of the row, and this rank's gradients for every row."""
    found = []
    with one_group(rank, world, layout=layout, documents="position_ids") as parallel:
        for lengths in ROWS:
            model = Model()
            shard = parallel.shard(batch_of(lengths, rows), module=model)
            with parallel.active(shard):
                logits = model(shard.batch)
                loss = F.cross_entropy(logits.flatten(0, 1), shard.batch["labels"].flatten())
                loss.backward()
            parallel.check(shard, loss)
            found.append((loss.item(), parallel.unshard(logits, shard), grads_of(model)))
    return pickle.dumps(found)


@pytest.mark.parametrize(
    ("world", "layout", "rows"),
    rotated(
        [2, 3, 4, 4],
        [
            ("balanced", 1),
            (Balanced(min_piece=1, align=1), 2),
            ("per_document_zigzag", 1),
            ("auto", 1),
        ],
    ),
)
def test_steps_are_those_of_one_process(
    pool: Pool, world: int, layout: str | Balanced, rows: int
) -> None:
    ranks = [pickle.loads(part) for part in pool.run(run_steps, layout, rows, world=world)]
    for number, lengths in enumerate(ROWS):
        batch, model = batch_of(lengths, rows), Model(alone=True)
        logits = model(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        for found in ranks:
            assert abs(found[number][0] - loss.item()) <= EXACT
            assert (found[number][1] - logits).abs().max() <= EXACT
        for name, grad in grads_of(model).items():
            mean = sum(found[number][2][name] for found in ranks) / world
            assert (mean - grad).abs().max() <= EXACT, (lengths, name)


def run_fit(rank: int, world: int, options: dict[str, Any], in_worker: bool) -> bytes:
    strategy: Any = ContextParallelStrategy(documents="position_ids", **options)
    model = Model()

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            collate: Any = (
                ContextParallelCollate(strategy, itemgetter(0)) if in_worker else itemgetter(0)
            )
            rows = [batch_of(lengths) for lengths in ROWS]
            return DataLoader(rows, 1, collate_fn=collate, num_workers=int(in_worker))

    trainer = pool_trainer(rank, world, strategy, max_epochs=1, use_distributed_sampler=False)
    with workers_allowed():
        trainer.fit(model, datamodule=Data())
    return pickle.dumps((model.losses, dict(model.state_dict())))


@pytest.mark.parametrize(
    ("world", "options", "in_worker"),
    [
        (2, {"layout": "balanced"}, False),
        (3, {"layout": Balanced(align=1, min_piece=1, rank_speed=(1, 1, 0.5))}, True),
    ],
    ids=["by-name", "with-options-in-a-worker"],
)
@pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning")
def test_a_fit_is_that_of_one_process(
    pool: Pool, world: int, options: dict[str, Any], in_worker: bool
) -> None:
    model = Model(alone=True)
    optimizer = model.configure_optimizers()
    for lengths in ROWS:
        optimizer.zero_grad()
        model.training_step(batch_of(lengths), 0).backward()
        optimizer.step()
    for part in pool.run(run_fit, options, in_worker, world=world):
        losses, parameters = pickle.loads(part)
        assert losses == pytest.approx(model.losses, abs=EXACT)
        for name, truth in model.state_dict().items():
            assert (parameters[name] - truth).abs().max() <= EXACT, name


def run_chosen(rank: int, world: int) -> list[str]:
    """The layouts of rows, after a step with causal attention."""
    with one_group(rank, world, documents="position_ids") as parallel:
        model, found = Model(), []
        for lengths in ((40000,), (300,) * 100, (20000, *[100] * 50), (4, 3)):
            shard = parallel.shard(batch_of(lengths))
            shard.digest.wait()
            found.append(shard.layout)
        with parallel.active(shard):
            model(shard.batch)
    return found


def test_auto_chooses_for_every_row(pool: Pool) -> None:
    for found in pool.run(run_chosen, world=3):
        assert found[:3] == ["zigzag", "zigzag", "balanced"]  # equal documents are even anyway


def run_exchanges(rank: int, world: int, differ: bool) -> tuple[list[str], list[float], str]:
    """Exchanges and losses where, from the second step on, the last one offered seems quickest."""
    offered = ("direct", "ring") if differ and rank else ("direct", "ring", "allgather")
    found, losses = [], []
    with (
        patch("lightning_cp.api.EXCHANGES", offered),
        patch("lightning_cp.plan.choose.NEARLY", 100.0),
        patch("lightning_cp.plan.choose.LEAST", -1.0),
        one_group(rank, world, documents="position_ids") as parallel,
    ):
        quickest.cache_clear()
        for lengths in ROWS:
            model = Model()
            shard = parallel.shard(batch_of(lengths), module=model)
            try:
                with parallel.active(shard):
                    loss = model.training_step(shard.batch, 0)
                    loss.backward()
            except MismatchError as error:
                return found, losses, str(error)
            found.append(str(shard.context.exchange))
            losses.append(loss.item())
    quickest.cache_clear()
    return found, losses, ""


def test_auto_chooses_an_exchange_for_every_row(pool: Pool) -> None:
    truth = [Model(alone=True).training_step(batch_of(lengths), 0).item() for lengths in ROWS]
    for found, losses, _ in pool.run(run_exchanges, False, world=3):
        assert found[0] == "direct"  # no call was seen yet
        assert set(found[1:]) == {"ring", "allgather"}  # not where that needs too much memory
        assert losses == pytest.approx(truth, abs=EXACT)


def test_ranks_with_different_exchanges_say_so(pool: Pool) -> None:
    for found, _, message in pool.run(run_exchanges, True, world=2):
        assert found == ["direct"]
        assert "exchange: rank 0 has allgather; rank 1 has ring" in message
        assert "layout" not in message


def run_different(rank: int, world: int) -> str:
    layout = Balanced(align=1, min_piece=1, work_cap=1.03 if rank else 1.5)
    with one_group(rank, world, layout=layout, documents="position_ids") as parallel:
        shard = parallel.shard(batch_of((40, 3, 5)))
        try:
            shard.digest.wait()
        except MismatchError as error:
            return str(error)
    return ""


def test_ranks_with_different_plans_say_so(pool: Pool) -> None:
    for message in pool.run(run_different, world=2):
        assert "layout: rank 0 has balanced of " in message
        assert "contents" not in message


def run_refused(rank: int, world: int) -> list[str]:
    found = []
    batch = batch_of((4, 4), 2)
    batch["position_ids"][1] = batch_of((3, 5))["position_ids"][0]
    with one_group(rank, world, layout="balanced", documents="position_ids") as parallel:
        try:
            parallel.shard(batch)
        except BatchError as error:
            found.append(str(error))
    try:
        with one_group(rank, world, layout=Balanced(rank_speed=(1, 2, 3))):
            pass
    except ConfigError as error:
        found.append(str(error))
    return found


def test_what_no_layout_can_place_is_refused_on_every_rank(pool: Pool) -> None:
    for rows, speeds in pool.run(run_refused, world=2):
        assert "the 2 rows of this batch hold different documents; pass one row" in rows
        assert "rank_speed has 3 speeds, the context-parallel group has 2 ranks" in speeds


def test_a_plan_follows_what_attention_saw_in_the_step_before(pool: Pool) -> None:
    for first, second in pool.run(run_windows, world=2):
        assert first != second


def run_windows(rank: int, world: int) -> tuple[Any, Any]:
    """Spans before and after a step whose attention sees both ways."""
    with one_group(rank, world, layout="balanced", documents="position_ids") as parallel:
        spans = []
        for _ in range(2):
            shard = parallel.shard(batch_of((4000, 90, 700)))
            spans.append(shard.cut.sequence.layout.spans)
            size = shard.batch["input_ids"].shape[1]
            q = torch.randn(1, 1, size, 4)
            with parallel.active(shard):
                F.scaled_dot_product_attention(q, q, q)
    return spans[0], spans[1]
