"""`loss="token_mean"`: means that a step takes by hand over its own tokens become right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cp.loss import token_mean
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.models import (
    IGNORED,
    Case,
    LanguageModel,
    Outcome,
    Text,
    outcome,
    trainer_of,
)
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

# Each as people write it; without a valid token the first two are 0 / 0.
STYLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum-over-sum": lambda losses, mask: (losses * mask).sum() / mask.sum(),
    "weights-first": lambda losses, mask: (losses * (mask / mask.sum())).sum(),
    "selected": lambda losses, mask: losses[mask != 0].mean(),
    "clamped": lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=1e-9),
}


class Fields(Dataset[Any]):
    """Pieces of the text whose valid tokens are said by `said`, with other names otherwise."""

    def __init__(self, case: Case, said: str) -> None:
        self._text, self._said = Text(case, case.samples), said

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> Any:
        sample = self._text[index]
        labels = sample.pop("labels")
        if self._said == "labels":
            return {**sample, "labels": labels}
        if self._said == "shift_labels":  # with labels beside them that say something else
            return {**sample, "shift_labels": labels, "labels": labels.clamp(min=0)}
        targets = {"targets": labels.clamp(min=0)}
        if self._said == "loss_mask":  # weights, and labels that say something else
            weights = (labels != IGNORED) * (1 + torch.arange(len(labels)) % 3 / 2)
            return {**sample, **targets, "loss_mask": weights, "labels": targets["targets"]}
        return {**sample, **targets}  # the attention mask, or all tokens


class ByHand(LanguageModel):
    """Computes the mean itself."""

    def __init__(self, case: Case, style: str, said: str, dense: bool, as_dict: bool) -> None:
        super().__init__(case, dense)
        self.style, self.said, self.as_dict = style, said, as_dict

    def loss(self, batch: Any) -> Tensor:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        logits = self.net(ids, batch.get("position_ids"), mask).transpose(1, 2)
        if self.said in ("labels", "shift_labels"):
            targets = batch[self.said]
            weights = (targets != IGNORED).to(logits.dtype)
        else:
            targets = batch["targets"]
            weights = batch[self.said] if self.said != "all" else torch.ones_like(targets)
            weights = weights.to(logits.dtype)
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
        return STYLES[self.style](losses, weights)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return {"loss": loss, "more": index} if self.as_dict else loss


def run(
    rank: int,
    world: int,
    case: Case,
    options: dict[str, Any] | None,
    model: tuple[str, str, bool],
) -> Outcome:
    """Train; a task of the pool."""
    style, said, as_dict = model
    torch.manual_seed(7)
    made = ByHand(case, style, said, options is None, as_dict)
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(made, DataLoader(Fields(case, said), batch_size=case.batch))
    return outcome(trainer, made)


def check(pool: Pool, case: Case, model: tuple[str, str, bool], world: int, **options: Any) -> None:
    (plain,) = pool.run(run, case, None, model, world=1)
    dims = {"sequence_dims": {"targets": 1, "id": None}}
    settings = {"context_parallel_size": world, "loss": "token_mean", **dims, **options}
    found = pool.run(run, case, settings, model, world=world)
    assert plain.counts["optimiser steps"] == 3
    for rank, got in enumerate(found):
        for name, value in plain.parameters.items():
            assert np.isfinite(value).all()
            distance = np.abs(got.parameters[name] - value).max()
            assert distance <= 1e-12, f"rank {rank}: {name} is off by {distance}"


USUAL = Case(precision="64-true")


@pytest.mark.parametrize(
    ("place", "style"),
    rotated(
        [(world, layout) for world in (1, 2, 3) for layout in ("contiguous", "zigzag")],
        [(style,) for style in STYLES],
    ),
)
def test_unequal_counts(place: tuple[int, str], style: str, pool: Pool) -> None:
    world, layout = place
    check(pool, USUAL, (style, "labels", False), world, layout=layout)


@pytest.mark.parametrize(("style", "world"), rotated(STYLES, [(2,), (3,)]))
def test_ranks_without_a_valid_token(style: str, world: int, pool: Pool) -> None:
    """The first two labels alone count: all ranks but the first have none."""
    case = Case(precision="64-true", valid="front")
    check(pool, case, (style, "labels", True), world, layout="contiguous")


def test_three_labels_on_one_rank_and_one_on_the_other(pool: Pool) -> None:
    case = Case(precision="64-true", lengths=(8,), batch=1, samples=3, valid=(0, 1, 2, 7))
    check(pool, case, ("sum-over-sum", "labels", True), 2, layout="contiguous")


@pytest.mark.parametrize(
    ("said", "length"),
    [
        *rotated(("loss_mask", "shift_labels"), [(3,), (13,), (24,)]),
        *rotated(("attention_mask", "all"), [(13,), (24,)]),
    ],
)
def test_what_says_which_tokens_count(said: str, length: int, pool: Pool) -> None:
    """Three tokens on three ranks are filled up with dummies, which never count."""
    padding = ("left", "right") if said == "attention_mask" else ()
    case = Case(precision="64-true", lengths=(length,), padding=padding)
    check(pool, case, ("sum-over-sum", said, False), 3)


@pytest.mark.parametrize("recomputed", ["blocks"])
def test_with_accumulation_and_recomputation(recomputed: Any, pool: Pool) -> None:
    case = Case(
        precision="64-true",
        samples=12,
        recomputed=recomputed,
        valid="front",
        trainer=(("accumulate_grad_batches", 2),),
    )
    check(pool, case, ("sum-over-sum", "labels", False), 2)


def failed(rank: int, world: int, case: Case, options: dict[str, Any], said: str = "labels") -> str:
    try:
        run(rank, world, case, options, ("sum-over-sum", said, False))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_without_the_option_the_report_says_the_way_out(pool: Pool) -> None:
    for message in pool.run(failed, USUAL, {"sequence_dims": {"id": None}}, world=2):
        assert message.startswith("MismatchError: ")
        assert "\n  loss: rank 0 has" in message
        for way_out in ("cross_entropy", "functional.sequence_mean", "loss='token_mean'"):
            assert way_out in message


def test_dummies_that_nothing_keeps_out_are_refused(pool: Pool) -> None:
    case = Case(precision="64-true", lengths=(3,))
    options = {"loss": "token_mean", "sequence_dims": {"targets": 1, "id": None}}
    for message in pool.run(failed, case, options, "all", world=3):
        assert message.startswith("RefusedError: 3 dummy tokens per row fill this batch up")
        assert "loss_mask of ones" in message


def test_manual_optimization_is_refused(pool: Pool) -> None:
    case = Case(precision="64-true", optimisation="manual")
    options = {"loss": "token_mean", "sequence_dims": {"id": None}}
    for message in pool.run(failed, case, options, world=2):
        assert message.startswith("RefusedError: loss='token_mean' averages the loss that a step")


def run_loss(rank: int, world: int, counts: list[float]) -> tuple[float, float]:
    """The value, and this rank's gradient of its own mean."""
    with one_group(rank, world) as parallel:
        shard = parallel.shard({"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
        value = torch.tensor([rank + 1.0 if counts[rank] else float("nan")], requires_grad=True)
        with parallel.active(shard):
            found = token_mean(value, counts[rank])
            found.sum().backward()
        assert found.shape == value.shape
        assert found.dtype == value.dtype
    assert value.grad is not None
    return found.item(), value.grad.item()


@pytest.mark.parametrize(
    ("counts", "value"),
    [([3, 1], 1.25), ([0, 2.5], 2.0), ([0, 0], 0.0), ([1, 0, 3], 2.5)],
)
def test_value_and_gradient(counts: list[float], value: float, pool: Pool) -> None:
    """The backward of a sum over ranks is a sum over ranks: world times the share."""
    world = len(counts)
    for rank, (found, grad) in enumerate(pool.run(run_loss, counts, world=world)):
        assert found == value
        assert grad == pytest.approx(world * counts[rank] / (sum(counts) or 1))


def test_outside_a_context() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert token_mean(loss, 3).item() == 2.0
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    mean = (x * 0).sum() / torch.zeros(())
    found = token_mean(mean, 0)
    found.backward()
    assert found.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0]
