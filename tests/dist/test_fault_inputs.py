"""Faults of what a step is given: embeddings, labels of rows, shifted labels, whole masks.

The smallest input of each. What is right is the same step on one process in double.
"""

import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp import functional
from lightning_cp.errors import ContextParallelError
from lightning_cp.layout import zigzag
from tests._harness import hf
from tests._harness.group import grads_of, one_group
from tests._harness.parts import CLASSES, WIDTH, Attention, Classifier, made
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

IGNORED = -100
Batch = dict[str, Tensor]


def stack() -> nn.Module:
    """Two layers of causal attention over embeddings."""
    return nn.Sequential(Attention(), Attention())


def features(length: int = 8, width: int = WIDTH) -> Tensor:
    """Features of tokens `[1, S, C]` in double, the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(1, length, width, generator=generator, dtype=torch.float64)


class Embedded(NamedTuple):
    """Embeddings of a table, made for the whole row before it is cut."""

    length: int
    multiple: int | None = None

    def step(self, table: Tensor, model: nn.Module) -> tuple[Batch, Tensor]:
        """The whole batch, and its embeddings, which need a gradient."""
        tokens = hf.tokens(1, self.length) % 16
        embeds = table[tokens]
        return {"inputs_embeds": embeds, "labels": tokens.roll(-1, 1) % WIDTH}, embeds


EMBEDDED = [Embedded(6, 4), Embedded(7), Embedded(5), Embedded(3), Embedded(1)]


def table_of() -> Tensor:
    """A learned table `[16, C]`."""
    numbers = torch.arange(16.0 * WIDTH, dtype=torch.float64).view(16, WIDTH)
    return numbers.sin().requires_grad_()


def run_embedded(rank: int, world: int, case: Embedded) -> bytes:
    """Loss, this rank's gradients of table and model, and that of dummies."""
    table, model = table_of(), made(stack)()
    with one_group(rank, world, pad_to_multiple_of=case.multiple) as context:
        batch, embeds = case.step(table, model)
        embeds.retain_grad()
        shard = context.shard(batch, module=model)
        local = shard.batch["inputs_embeds"]
        local.retain_grad()
        with context.active(shard):
            loss = F.cross_entropy(model(local).mT, shard.batch["labels"])
            loss.backward()
        dummies = ~shard.cut.sequence.real(rank)
    assert embeds.grad is not None
    others = torch.ones(case.length, dtype=torch.bool)
    others[shard.cut.sequence.layout.positions(rank)[~dummies]] = False
    assert not embeds.grad[:, others].any(), "a rank has the gradient of its own tokens alone"
    return pickle.dumps((loss.item(), table.grad, grads_of(model), local.grad[:, dummies]))


@pytest.mark.parametrize("case", EMBEDDED, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_reach_what_made_the_embeddings(world: int, case: Embedded, pool: Pool) -> None:
    table, model = table_of(), made(stack)()
    batch, embeds = case.step(table, model)
    expected = F.cross_entropy(model(embeds).mT, batch["labels"])
    expected.backward()
    ranks = [pickle.loads(x) for x in pool.run(run_embedded, case, world=world)]
    assert table.grad is not None
    filled = sum(dummies.shape[1] for *_, dummies in ranks)
    least = max(case.length, 2 * world)
    assert filled == least + -least % (case.multiple or 1) - case.length
    for loss, _, _, dummies in ranks:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert not dummies.any()
    mean = sum(found[1] for found in ranks) / world
    torch.testing.assert_close(mean, table.grad, rtol=1e-11, atol=1e-13)
    for name, grad in grads_of(model).items():
        mean = sum(found[2][name] for found in ranks) / world
        torch.testing.assert_close(mean, grad, rtol=1e-11, atol=1e-13)


class MeanHead(nn.Linear):
    """Classifies the mean of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, C]` to `[B, K]`."""
        return super().forward(functional.sequence_mean(x))


def run_classes(rank: int, world: int, labels: Tensor, declared: bool) -> bytes:
    """Loss and gradients, or the refusal."""
    model = made(Classifier, MeanHead)()
    dims: dict[str, int | None] = {"labels": None} if declared else {}
    with one_group(rank, world, sequence_dims=dims) as context:
        try:
            shard = context.shard({"input_ids": hf.tokens(4, 4), "labels": labels}, module=model)
            with context.active(shard):
                loss = model.training_step(shard.batch, 0)  # type: ignore[operator]
                loss.backward()
        except ContextParallelError as error:
            return pickle.dumps(str(error))
    return pickle.dumps((loss.item(), grads_of(model)))


@pytest.mark.parametrize("world", [2, 3])
def test_as_many_labels_of_rows_as_tokens(world: int, pool: Pool) -> None:
    """One label for each of four rows of four tokens: refused, and right once it is declared."""
    labels = torch.tensor([0, 1, 2, 1])
    assert int(labels.max()) < CLASSES
    for said in map(pickle.loads, pool.run(run_classes, labels, False, world=world)):
        assert said.startswith("field 'labels' of shape (4,) has a dimension of the sequence len")
        assert "{'labels': None} to pass it through" in said
    model = made(Classifier, MeanHead)()
    expected = model.training_step({"input_ids": hf.tokens(4, 4), "labels": labels}, 0)
    expected.backward()
    ranks = [pickle.loads(x) for x in pool.run(run_classes, labels, True, world=world)]
    for loss, _ in ranks:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, grad in grads_of(model).items():
        mean = sum(found[1][name] for found in ranks) / world
        torch.testing.assert_close(mean, grad, rtol=1e-11, atol=1e-13)


class Own(nn.Module):
    """A head that shifts `labels` itself, and takes shifted labels without a use for them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, inputs_embeds: Tensor, labels: Tensor, **ignored: Tensor) -> Tensor:
        """The mean loss of the next token."""
        logits = self.head(inputs_embeds)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def run_ignoring(rank: int, world: int, layout: str) -> list[str]:
    """What three steps say."""
    said, model = [], Own()
    labels = torch.arange(8)[None]
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    batch = {"inputs_embeds": features(), "labels": labels, "shift_labels": shifted}
    with one_group(rank, world, layout=layout) as context:
        for _ in range(3):
            shard = context.shard(batch, module=model)
            try:
                with context.active(shard):
                    model(**shard.batch)
                said.append("nothing")
            except ContextParallelError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_model_that_has_no_use_for_shifted_labels_is_refused(layout: str, pool: Pool) -> None:
    """In the first step, which is audited, and later, where targets are counted."""
    for first, *later in pool.run(run_ignoring, layout, world=2):
        assert "(Own, test_fault_inputs.py:" in first
        assert "a shift along the sequence" in first
        for message in later:
            assert "3 targets = 1 rows x (4 local tokens - 1)" in message


FULL: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "multiplied": lambda losses, batch: losses * batch["mask"],
    "indexed": lambda losses, batch: losses[batch["mask"]],
    "selected": lambda losses, batch: losses.masked_select(batch["mask"]),
    "filled": lambda losses, batch: losses.masked_fill(batch["mask"], 0),
    "averaged": lambda losses, batch: functional.sequence_mean(losses, mask=batch["mask"]),
}


def run_full(rank: int, world: int, declared: bool) -> list[str]:
    """What each use of a whole mask on local losses raises."""
    mask = torch.arange(8)[None] > 2
    batch = {"inputs_embeds": features(), "labels": torch.arange(8)[None], "mask": mask}
    dims: dict[str, int | None] = {"mask": None} if declared else {}
    said = []
    with one_group(rank, world, sequence_dims=dims) as context:
        for use in FULL.values():
            try:
                shard = context.shard(batch)
                with context.active(shard):
                    logits, labels = shard.batch["inputs_embeds"], shard.batch["labels"]
                    use(F.cross_entropy(logits.mT, labels, reduction="none"), shard.batch)
                said.append("nothing")
            except (RuntimeError, ValueError, IndexError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_a_mask_that_is_kept_whole_does_not_fit_local_losses(world: int, pool: Pool) -> None:
    for rank, said in enumerate(pool.run(run_full, True, world=world)):
        share = zigzag(8, world).size(rank)
        for name, message in zip(FULL, said, strict=True):
            assert message != "nothing", name
            assert "8" in message, f"{name}: {message}"
            assert str(share) in message, f"{name}: {message}"
    for said in pool.run(run_full, False, world=world):
        for message in said:
            assert message.startswith("BatchError: field 'mask' of shape (1, 8)"), message
