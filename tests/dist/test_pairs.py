"""Models that read two sequences, unchanged, on parts of both equal themselves on whole rows."""

import pickle
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp import verify
from lightning_cp.diagnostics.verify import Report
from lightning_cp.plugin import ContextParallelStrategy
from tests._harness import pairs
from tests._harness.grid import rotated
from tests._harness.group import grads_of, one_group
from tests._harness.hf import in_double
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer, workers_allowed

pytestmark = pytest.mark.dist

TOLERANCE = 1e-11
CASES = {
    "longer": (19, 7, False),
    "padded": (13, 8, True),
    "shorter": (5, 11, True),
    "one": (9, 1, False),
    "alike": (12, 12, True),
}
"""Lengths of source and target, and whether rows are padded."""
WORLDS = [(2,), (3,), (1,), (4,)]


class Found(NamedTuple):
    """What a step gave: loss, outputs of whole rows, gradients."""

    loss: float
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]


def run_cases(rank: int, world: int, name: str) -> bytes:
    found, pair, models = {}, pairs.PAIRS[name], []
    options = {"sequence_dims": dict(pair.dims), "predict_gather": "all"}
    with one_group(rank, world, **options) as parallel:
        for title, case in CASES.items():
            model = pair.make()
            models.append(model)
            with in_double():
                shard = parallel.shard(pair.batch(*case), module=model, stage=title)
                with parallel.active(shard):
                    step = pair.call(model, shard.batch)
                    step.loss.backward()
                parallel.check(shard, step.loss)
            assert shard.context.log.attention == pair.attention
            outputs = parallel.gather(dict(step.outputs), shard)
            found[title] = Found(step.loss.item(), outputs, grads_of(model))
    hooks = [part._forward_pre_hooks for model in models for part in model.modules()]
    assert not any(hooks), "all hooks are taken out"
    return pickle.dumps(found)


@cache
def alone(name: str, title: str) -> Found:
    """The same on one process, once for all numbers of ranks."""
    pair = pairs.PAIRS[name]
    model = pair.make()
    with in_double():
        step = pair.call(model, pair.batch(*CASES[title]))
        step.loss.backward()
    outputs = {key: x.detach() for key, x in step.outputs.items()}
    return Found(step.loss.item(), outputs, grads_of(model))


def assert_equal(found: list[Found], expected: Found, batch: pairs.Batch) -> None:
    for rank, one in enumerate(found):
        assert one.loss == pytest.approx(expected.loss, rel=TOLERANCE), f"loss of rank {rank}"
        for key, output in expected.outputs.items():
            assert one.outputs[key].shape == output.shape, f"{key} of rank {rank}"
            off = (one.outputs[key] - output)[pairs.real(batch, output)].abs().max().item()
            assert off < TOLERANCE * output.abs().max().item(), f"{key} of rank {rank}: {off}"
    largest = max(grad.abs().max().item() for grad in expected.grads.values())
    for key, grad in expected.grads.items():
        mean = sum(one.grads[key] for one in found) / len(found)
        off = (mean - grad).abs().max().item() / largest
        assert off < TOLERANCE, f"gradient of {key} is off by {off}"


@pytest.mark.parametrize(("name", "world"), rotated(pairs.PAIRS, WORLDS))
def test_pairs(pool: Pool, name: str, world: int) -> None:
    ranks = pool.run(run_cases, name, world=world, timeout=100)
    found = [pickle.loads(x) for x in ranks]
    for title, case in CASES.items():
        try:
            batch = pairs.PAIRS[name].batch(*case)
            assert_equal([one[title] for one in found], alone(name, title), batch)
        except AssertionError as error:
            raise AssertionError(f"{name}, {title}: {error}") from error


def verified(rank: int, world: int, name: str, title: str) -> Report:
    pair = pairs.PAIRS[name]
    with in_double(), one_group(rank, world, sequence_dims=dict(pair.dims)) as parallel:
        model = pair.make()

        def step(batch: Any) -> Tensor:
            return pair.call(model, batch).loss

        batch = pair.batch(*CASES[title])
        return verify(model, batch, parallel=parallel, step=step, max_tokens=11, show=False)


@pytest.mark.parametrize(
    ("name", "world", "title"),
    rotated(
        pairs.PAIRS,
        [(3, "alike"), (2, "padded"), (2, "longer")],
        rare=list(pairs.PAIRS)[1::2],
    ),
)
def test_verify_has_no_finding(pool: Pool, name: str, world: int, title: str) -> None:
    for report in pool.run(verified, name, title, world=world, timeout=100):
        assert report.ok, report.finding
        assert report.compared.attention == (pairs.PAIRS[name].attention,) * 2


class Lit(pl.LightningModule):
    """A plain module around an encoder-decoder of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = pairs.bart()
        self.lengths: list[int] = []

    def training_step(self, batch: pairs.Batch, index: int) -> Tensor:
        self.lengths.append(batch["labels"].shape[1])
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        self.log("predicted", (batch["labels"] >= 0).sum().double(), reduce_fx="sum")
        return loss

    def predict_step(self, batch: pairs.Batch, index: int) -> dict[str, Tensor]:
        out = self.model(**batch)
        return {"logits": out.logits, "encoded": out.encoder_last_hidden_state}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [(13, 8, True), (12, 12, True)]


def made(index: int) -> pairs.Batch:
    """One whole batch; the collate function of loaders."""
    return pairs.translation(*BATCHES[index])


class Trained(NamedTuple):
    """What a run gave."""

    state: dict[str, Tensor]
    logged: dict[str, Tensor]
    predicted: list[dict[str, Tensor]]
    lengths: list[int]


def trained(rank: int, world: int, workers: int, strategy: Any) -> bytes:
    module = Lit()
    with in_double(), workers_allowed():
        trainer = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true")
        loader = DataLoader(
            range(len(BATCHES)), batch_size=None, collate_fn=made, num_workers=workers
        )
        trainer.fit(module, loader)
        predicted: Any = trainer.predict(module, loader)
    logged = dict(trainer.logged_metrics) or dict(trainer.callback_metrics)
    return pickle.dumps(Trained(module.state_dict(), logged, predicted, module.lengths))


def cut_run(rank: int, world: int, workers: int) -> bytes:
    strategy = ContextParallelStrategy(context_parallel_size=world, predict_gather="all")
    return trained(rank, world, workers, strategy)


def plain_run(rank: int, world: int) -> bytes:
    return trained(rank, world, 0, "auto")


@pytest.mark.full
@pytest.mark.parametrize(("world", "workers"), [(2, 1), (3, 0)])
def test_trainer(pool: Pool, tmp_path: Path, world: int, workers: int) -> None:
    expected: Trained = pickle.loads(pool.run(plain_run, world=1, timeout=100)[0])
    for rank in (pickle.loads(x) for x in pool.run(cut_run, workers, world=world, timeout=100)):
        assert max(rank.lengths) < max(expected.lengths)
        for key, value in expected.state.items():
            torch.testing.assert_close(rank.state[key], value, rtol=1e-9, atol=1e-10, msg=key)
        for one, whole, case in zip(rank.predicted, expected.predicted, BATCHES, strict=True):
            for key, value in whole.items():
                kept = pairs.real(pairs.translation(*case), value)
                torch.testing.assert_close(one[key][kept], value[kept], rtol=1e-9, atol=1e-10)
