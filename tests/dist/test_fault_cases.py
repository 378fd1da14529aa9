"""Faults of losses and gradients that people met: the smallest input of each, and what is right.

What is right is a number known by hand, or the same step on one process in double.
"""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy, functional, verify
from lightning_cp.api import ContextParallel, Shard
from lightning_cp.diagnostics.trace import CollectiveRecorder
from lightning_cp.errors import MismatchError
from lightning_cp.loss import token_sums
from tests._harness.group import grads_of, one_group
from tests._harness.parts import Model, made, pieces
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist

CLASSES, IGNORED = 4, -100
NAN, INF = float("nan"), float("inf")
Batch = dict[str, Tensor]


def scores(length: int = 8) -> Tensor:
    """Scores `[1, S, CLASSES]` in double, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(1, length, CLASSES, generator=generator, dtype=torch.float64)


def labels_at(*places: int, length: int = 8) -> Tensor:
    """Labels `[1, S]` that count at some places alone."""
    labels = torch.full((1, length), IGNORED)
    for place in places:
        labels[0, place] = place % CLASSES
    return labels


def nll(context: ContextParallel, shard: Shard, logs: Tensor) -> Tensor:
    return F.nll_loss(logs.flatten(0, 1), shard.batch["labels"].flatten())


def selected(context: ContextParallel, shard: Shard, logs: Tensor) -> Tensor:
    labels = shard.batch["labels"]
    losses = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return functional.sequence_mean(losses, mask=labels != IGNORED).sum()


def by_hand(context: ContextParallel, shard: Shard, logs: Tensor) -> Tensor:
    labels = shard.batch["labels"]
    losses = F.nll_loss(logs.mT, labels, reduction="none")
    return context.token_mean(shard, losses.sum() / (labels != IGNORED).sum())


MEANS: dict[str, Callable[[ContextParallel, Shard, Tensor], Tensor]] = {
    "nll_loss": nll,
    "sequence_mean": selected,
    "token_mean": by_hand,
}


def run_weights(rank: int, world: int, how: str, places: tuple[int, ...]) -> bytes:
    """Loss, the weight of every local token in the mean over ranks, and sum and count."""
    batch = {"scores": scores().log_softmax(-1), "labels": labels_at(*places)}
    with one_group(rank, world, layout="contiguous", sequence_dims={"scores": 1}) as context:
        shard = context.shard(batch)
        logs = shard.batch["scores"].requires_grad_()
        with context.active(shard):
            loss = MEANS[how](context, shard, logs)
            loss.backward()
            valid = (shard.batch["labels"] != IGNORED).double()
            sums = token_sums(valid * 2, valid)
    assert logs.grad is not None
    return pickle.dumps((loss.item(), -logs.grad / world, shard.batch["labels"], sums.tolist()))


@pytest.mark.parametrize("how", list(MEANS))
@pytest.mark.parametrize("world", [2, 3])
def test_labels_weigh_the_same_on_whatever_rank_they_lie(world: int, how: str, pool: Pool) -> None:
    """Labels 3 / 1 on two ranks, 3 / 0 / 1 on three: each weighs 1/4, and 4 are counted."""
    places = (0, 1, 2, 7)
    logs = scores().log_softmax(-1)
    expected = F.nll_loss(logs.flatten(0, 1), labels_at(*places).flatten()).item()
    for part in pool.run(run_weights, how, places, world=world):
        loss, weights, labels, sums = pickle.loads(part)
        assert loss == pytest.approx(expected, rel=1e-14)
        right = torch.where(labels == IGNORED, 0.0, 0.25)
        assert torch.equal(weights.sum(-1), right.double())
        assert sums == [8.0, 4.0]


@pytest.mark.parametrize("how", list(MEANS))
def test_no_label_anywhere_is_a_loss_of_zero(how: str, pool: Pool) -> None:
    for part in pool.run(run_weights, how, (), world=3):
        loss, weights, _, sums = pickle.loads(part)
        assert loss == 0.0
        assert not weights.any()
        assert sums == [0.0, 0.0]


def run_collectives(rank: int, world: int, places: tuple[int, ...]) -> bytes:
    """The reductions of forward and backward of a head with a swapped loss, and its gradient."""
    batch = {"inputs_embeds": scores(), "labels": labels_at(*places)}
    torch.manual_seed(1)
    head = nn.Linear(CLASSES, CLASSES).double()
    with one_group(rank, world, layout="contiguous") as context:
        shard = context.shard(batch)
        with context.active(shard), CollectiveRecorder() as recorder:
            logits = head(shard.batch["inputs_embeds"])
            F.cross_entropy(logits.flatten(0, 1), shard.batch["labels"].flatten()).backward()
    calls = [call._replace(group="") for call in recorder.calls]  # each run has groups of its own
    return pickle.dumps((calls, head.weight.grad))


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_labels_enters_every_reduction(world: int, pool: Pool) -> None:
    every = [pickle.loads(x) for x in pool.run(run_collectives, tuple(range(8)), world=world)]
    first = [pickle.loads(x) for x in pool.run(run_collectives, (0,), world=world)]
    none = [pickle.loads(x) for x in pool.run(run_collectives, (), world=world)]
    calls = [found for ranks in (every, first, none) for found, _ in ranks]
    assert len(calls[0]) == 2, calls[0]  # one forward, one backward
    assert all(found == calls[0] for found in calls)
    assert first[0][1].any()
    assert not any(grad.any() for _, grad in (*first[1:], *none))


SMOOTHING = 0.1
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "channels": lambda x, y: F.cross_entropy(x.mT, y),
    "smoothed": lambda x, y: F.cross_entropy(x.mT, y, label_smoothing=SMOOTHING),
    "sum": lambda x, y: F.cross_entropy(x.mT, y, reduction="sum"),
    "nll_loss": lambda x, y: F.nll_loss(x.mT, y),
}


def undefined() -> Batch:
    """Scores that are NaN or infinite at tokens that are ignored."""
    bad = scores()
    bad[0, 2], bad[0, 3, 1], bad[0, 5, 0] = NAN, INF, -INF
    return {"scores": bad, "labels": labels_at(0, 1, 4, 6, 7)}


def run_undefined(rank: int, world: int, layout: str) -> bytes:
    """Loss, and gradient of whole scores, for every loss."""
    found = {}
    with one_group(rank, world, layout=layout, sequence_dims={"scores": 1}) as context:
        for name, loss_of in LOSSES.items():
            shard = context.shard(undefined())
            local = shard.batch["scores"].requires_grad_()
            with context.active(shard):
                loss = loss_of(local, shard.batch["labels"])
                loss.backward()
            assert local.grad is not None
            found[name] = (loss.item(), context.unshard(local.grad / world, shard))
    return pickle.dumps(found)


@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), (2, "contiguous"), (3, "zigzag")])
def test_nan_at_ignored_tokens_is_selected_away(world: int, layout: str, pool: Pool) -> None:
    ranks = [pickle.loads(x) for x in pool.run(run_undefined, layout, world=world)]
    labels = undefined()["labels"]
    for name, loss_of in LOSSES.items():
        whole = undefined()["scores"].requires_grad_()
        expected = loss_of(whole, labels)
        assert expected.isfinite()
        expected.backward()
        assert whole.grad is not None
        for loss, grad in (found[name] for found in ranks):
            assert loss == pytest.approx(expected.item(), rel=1e-14), name
            torch.testing.assert_close(grad, whole.grad, rtol=1e-13, atol=0, equal_nan=True)
            assert grad[labels != IGNORED].isfinite().all()


class Run(NamedTuple):
    """Batches of one epoch, and how many make a step of the optimizer."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    rows: int = 1
    accumulated: int = 1

    def batches(self) -> list[Batch]:
        """Tokens and labels `[B, S]`, of which the last `count` tokens of the last row count."""
        found = []
        for index, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            rows = pieces(length + index)[: self.rows, index:]
            labels = rows[:, 1:].clone()
            labels[-1, : length - count] = IGNORED
            found.append({"input_ids": rows[:, :-1].clone(), "labels": labels})
        return found


RUNS = {
    "1 and 7 labels, 3 and 5": Run((8,) * 4, (1, 7, 3, 5), accumulated=2),
    "1 and 3 labels in rows of other lengths": Run((5, 8), (1, 3), accumulated=2),
    "lengths 5, 8 and 3 of two rows": Run((5, 8, 3), (2, 8, 1), rows=2),
}
CLIP, RATE = 0.05, 0.5


class Lit(pl.LightningModule):
    """Trains a model, and remembers the gradients before they are clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = made(Model)()
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss: Tensor = self.net.training_step(batch, index)  # type: ignore[operator]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: grad.clone() for name, grad in grads_of(self.net).items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def run_trainer(rank: int, world: int, name: str) -> bytes:
    """Gradients of every step before clipping, and parameters at the end."""
    module, run = Lit(), RUNS[name]
    strategy: Any = ContextParallelStrategy(context_parallel_size=world) if world > 1 else "auto"
    options = {"accumulate_grad_batches": run.accumulated, "gradient_clip_val": CLIP}
    trainer = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true", **options)
    trainer.fit(module, DataLoader(run.batches(), batch_size=None))  # type: ignore[arg-type]
    return pickle.dumps((module.seen, module.net.state_dict()))


def mean_of_means(run: Run) -> list[dict[str, Tensor]]:
    """Gradients of the first steps by hand: the mean over micro-batches of means over labels."""
    model, found = made(Model)(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = run.batches()
    for start in range(0, len(batches), run.accumulated):
        optimizer.zero_grad()
        for batch in batches[start : start + run.accumulated]:
            (model.training_step(batch, 0) / run.accumulated).backward()  # type: ignore[operator]
        found.append({name: grad.clone() for name, grad in grads_of(model).items()})
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return found


@pytest.mark.parametrize("name", list(RUNS))
def test_micro_batches_of_unequal_labels_and_lengths(name: str, pool: Pool) -> None:
    """Gradients are whole before they are clipped, and ranks stay equal bit by bit."""
    ((seen, state),) = [pickle.loads(x) for x in pool.run(run_trainer, name, world=1)]
    for plain, hand in zip(seen, mean_of_means(RUNS[name]), strict=True):
        for key, grad in hand.items():
            assert (plain[key] - grad).abs().max() < 1e-12, key
    for world in (2, 3):
        ranks = [pickle.loads(x) for x in pool.run(run_trainer, name, world=world)]
        for found, parameters in ranks:
            for step, plain in enumerate(seen):
                norm = sum(grad.square().sum() for grad in plain.values()) ** 0.5
                assert norm > 2 * CLIP, "clipping changes the step"
                for key, grad in plain.items():
                    assert (found[step][key] - grad).abs().max() < 1e-12, f"{step}: {key}"
                    assert torch.equal(found[step][key], ranks[0][0][step][key])
            for key, value in state.items():
                assert (parameters[key] - value).abs().max() < 1e-12, key
                assert torch.equal(parameters[key], ranks[0][1][key])


class OwnCount(Model):
    """Divides the sum of the group by the number of labels of this rank."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """A mean on one device; too large by the number of ranks where labels are cut."""
        labels = batch["labels"]
        return F.cross_entropy(self(batch).mT, labels, reduction="sum") / (labels != IGNORED).sum()


def run_own_count(rank: int, world: int, places: tuple[int, ...]) -> str:
    """What the comparison of the first step says; where nothing, the module the verifier names."""
    model = made(OwnCount)()
    batch = {"input_ids": pieces(8)[:1, :8].clone(), "labels": labels_at(*places)}
    with one_group(rank, world, layout="contiguous") as context:
        shard = context.shard(batch, module=model)
        with context.active(shard):
            loss = model.training_step(shard.batch, 0)  # type: ignore[operator]
        try:
            context.check(shard, loss)
        except MismatchError as error:
            return str(error)
        finding = verify(model, batch, parallel=context, show=False).finding
        return f"the verifier names {finding.module!r}" if finding is not None else "nothing"


@pytest.mark.parametrize(
    ("places", "words"),
    [((0, 1, 2, 7), "loss: rank 0 has"), ((0, 1, 6, 7), "the verifier names ''")],
)
def test_a_sum_of_the_group_over_a_count_of_one_rank(
    places: tuple[int, ...], words: str, pool: Pool
) -> None:
    """Peers see different losses; with as many labels on each the verifier alone sees it."""
    for said in pool.run(run_own_count, places, world=2):
        assert words in said
