"""Predictions are whole rows in their original order, once: those of the plain Trainer."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

from lightning_cp import functional
from lightning_cp.data.containers import leaves
from tests._harness.grid import rotated
from tests._harness.models import Case, LanguageModel, Text, seeded, trainer_of

pytestmark = pytest.mark.dist

DOUBLE = Case(precision="64-true", samples=5, lengths=(24,))


class Pair(NamedTuple):
    """A named tuple of outputs."""

    best: Tensor
    ids: Tensor


@dataclass
class Everything:
    """A dataclass of outputs."""

    pair: Pair
    hidden: list[Tensor]
    pooled: Tensor
    text: str
    count: int
    nothing: None = None


class Predicting(LanguageModel):
    """Returns what `make` says, of the logits and the batch."""

    make: Callable[[Any, Tensor, Any], Any]

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.shown: list[Any] = []

    def predict_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> Any:
        tokens, _, _, *rest = self.fields(batch)
        return type(self).make(self, self.net(tokens, *rest), batch)

    def on_predict_batch_end(self, outputs: Any, *args: Any) -> None:
        self.shown.append(outputs)


def everything(model: Any, logits: Tensor, batch: Any) -> Any:
    ids = batch["id"]
    hidden = [logits[..., :3], logits[..., None, :2].float() > 0]
    pooled = functional.sequence_mean(logits) if model.case.precision == "64-true" else ids
    return {
        "all": Everything(Pair(logits.argmax(-1), ids), hidden, pooled, "abc", 7),
        "scores": (pooled.sum(), [1, "x"], float(pooled.sum())),
    }


def output(model: Any, logits: Tensor, batch: Any) -> Any:
    return CausalLMOutput(logits=logits, hidden_states=(logits[..., :2], logits[..., 2:4]))


def bare(model: Any, logits: Tensor, batch: Any) -> Any:
    return logits.softmax(-1)


def half(model: Any, logits: Tensor, batch: Any) -> Any:
    return OrderedDict(half=logits.bfloat16(), ids=batch["id"], whole=logits.to(torch.complex64))


def nothing(model: Any, logits: Tensor, batch: Any) -> Any:
    return {"seen": batch["id"].tolist()}


def time_first(model: Any, logits: Tensor, batch: Any) -> Any:
    return {"by_time": logits.transpose(0, 1), "last": logits.mT}


def classes(model: Any, logits: Tensor, batch: Any) -> Any:
    """As many classes as this rank has tokens of 24 on two ranks."""
    return functional.sequence_mean(logits)[:, :12]


def flattened(model: Any, logits: Tensor, batch: Any) -> Any:
    return {"logits": logits.flatten(0, 1)}


def an_object(model: Any, logits: Tensor, batch: Any) -> Any:
    return {"of": torch.Generator()}


def local_mean(model: Any, logits: Tensor, batch: Any) -> Any:
    return float(logits.square().sum())


def structure(model: Any, logits: Tensor, batch: Any) -> Any:
    return [logits] * (1 + model.global_rank)


class NoLabels(Text):
    """Samples as they are when one predicts."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {name: sample[name] for name in sample if name != "labels"}


def model_of(case: Case, make: Callable[..., Any], dense: bool) -> Predicting:
    kind = type("Predicting", (Predicting,), {"make": make})
    pl.seed_everything(7, verbose=False)
    model = kind(case, dense)
    assert isinstance(model, Predicting)
    return model


def predict(
    rank: int,
    world: int,
    case: Case,
    options: dict[str, Any] | None,
    make: Callable[..., Any],
    **trainer: Any,
) -> Any:
    """What `Trainer.predict` returns; a task of the pool."""
    model = model_of(case, make, options is None)
    data = NoLabels(case, case.samples) if make is bare else Text(case, case.samples)
    runner = trainer_of(rank, world, case, options, **trainer)
    found = runner.predict(model, DataLoader(data, batch_size=case.batch))
    if options is None or options.get("predict_gather", "rank0_cpu") != "rank0_cpu":
        assert len(found) == len(model.shown)
    for one, other in zip(found, model.shown, strict=True):
        assert (one is None) == (other is None)
    return found


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert type(found) is type(expected)
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            other = ours[name]
            assert (other.shape, other.dtype) == (value.shape, value.dtype), name
            assert other.device.type == "cpu"
            if value.is_floating_point() or value.is_complex():
                rounded = tolerance if value.dtype == torch.float64 else 2e-2
                assert torch.allclose(other, value, rtol=rounded, atol=rounded), name
            else:
                assert torch.equal(other, value), name
        else:
            close = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert ours[name] == close, name


@pytest.mark.parametrize(
    ("make", "world", "layout"),
    rotated((everything, output, bare, half, nothing), [(2, "contiguous"), (3, "zigzag")]),
)
def test_whole_rows_on_the_first_rank(make, world, layout, pool):
    case = replace(DOUBLE, lengths=(24, 7, 3))
    (expected,) = pool.run(predict, case, None, make, world=1)
    first, *others = pool.run(predict, case, {"layout": layout}, make, world=world)
    assert len(first) == len(expected) == 3
    for one, other in zip(first, expected, strict=True):
        same(one, other)
    assert others == [[None] * 3] * (world - 1)


def test_two_by_two(pool):
    case = replace(DOUBLE, samples=7)
    expected = pool.run(predict, case, None, everything, world=2)
    found = pool.run(predict, case, {"context_parallel_size": 2}, everything, world=4)
    for device, (first, second) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert len(first) == len(expected[device]) == 2
        for one, other in zip(first, expected[device], strict=True):
            same(one, other)
        assert second == [None, None]
    ids = [x["all"].pair.ids.tolist() for device in found[::2] for x in device]
    assert sorted(number for rows in ids for number in rows) == list(range(7))


def test_all_ranks(pool):
    (expected,) = pool.run(predict, DOUBLE, None, everything, world=1)
    for found in pool.run(predict, DOUBLE, {"predict_gather": "all"}, everything, world=3):
        for one, other in zip(found, expected, strict=True):
            same(one, other)


def test_parts(pool):
    options = {"predict_gather": "none", "layout": "contiguous"}
    (expected,) = pool.run(predict, DOUBLE, None, bare, world=1)
    found = pool.run(predict, DOUBLE, options, bare, world=3)
    assert [x[0].shape[1] for x in found] == [8, 8, 8]
    for index, whole in enumerate(expected):
        same(torch.cat([x[index] for x in found], 1), whole)


@pytest.mark.parametrize("world", [2, 3])
def test_padding_and_dummies(world, pool):
    case = replace(DOUBLE, lengths=(13,), padding=("left", "right"))
    (expected,) = pool.run(predict, case, None, bare, world=1)
    found = pool.run(predict, case, {"pad_to_multiple_of": 16}, bare, world=world)[0]
    hidden = [NoLabels(case, 5)[index]["attention_mask"] == 1 for index in range(5)]
    ours, theirs = torch.cat(found), torch.cat(expected)
    assert ours.shape == theirs.shape == (5, 13, 256)
    for row, visible in enumerate(hidden):
        assert torch.allclose(ours[row, visible], theirs[row, visible], rtol=1e-12, atol=1e-12)


def test_declared_dims(pool):
    dims = {"predictions.by_time": 0, "predictions.last": -1}
    (expected,) = pool.run(predict, DOUBLE, None, time_first, world=1)
    found = pool.run(predict, DOUBLE, {"sequence_dims": dims}, time_first, world=3)[0]
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def test_classes_may_be_as_many_as_tokens(pool):
    (expected,) = pool.run(predict, DOUBLE, None, classes, world=1)
    options = {"sequence_dims": {"predictions": None}}
    for one, other in zip(
        pool.run(predict, DOUBLE, options, classes, world=2)[0], expected, strict=True
    ):
        same(one, other)
    (three, *_) = pool.run(predict, DOUBLE, {}, classes, world=3)
    for one, other in zip(three, expected, strict=True):
        same(one, other)


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str, tuple[str, ...]]] = {
    "equal": (classes, {}, "RefusedError", ("predictions of shape (2, 12)", "'predictions': None")),
    "flattened": (flattened, {}, "MismatchError", ("values of predictions.logits", "'none'")),
    "object": (an_object, {}, "RefusedError", ("predictions.of is a Generator", "'none'")),
    "local-mean": (local_mean, {}, "MismatchError", ("values of predictions", "rank 1 has")),
    "structure": (structure, {}, "MismatchError", ("outputs of one micro-step", "rank 1 has")),
    "dim": (
        bare,
        {"sequence_dims": {"predictions": 2}},
        "RefusedError",
        ("dim 2 of 'predictions'", "(2, 12, 256)", "[12, 12]"),
    ),
}


def refused(rank: int, world: int, name: str) -> tuple[str, str] | None:
    """The error of a prediction, as a value; a task of the pool."""
    make, options, _, _ = REFUSED[name]
    try:
        predict(rank, world, DOUBLE, options, make)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_together_is_refused_on_every_rank(name, pool):
    _, _, kind, parts = REFUSED[name]
    found = pool.run(refused, name, world=2)
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0][0] == kind, found[0]
    for part in parts:
        assert part in found[0][1], found[0][1]


class Writer(BasePredictionWriter):
    """Writes what a usual writer does, and remembers that it was asked to."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder, self.hooks = folder, 0

    def write_on_batch_end(self, *args: Any) -> None:
        _, _, prediction, indices, _, index, loader = args
        torch.save((prediction, indices), self.folder / f"batch-{loader}-{index}")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self.folder / "epoch")

    def on_predict_end(self, *args: Any) -> None:
        self.hooks += 1


def write(
    rank: int, world: int, case: Case, options: dict[str, Any] | None, folder: Path
) -> tuple[Any, int, bool]:
    """Predict with a writer and without returning; a task of the pool."""
    model, writer = model_of(case, bare, options is None), Writer(folder)
    trainer = trainer_of(rank, world, case, options, callbacks=[writer])
    loader = DataLoader(NoLabels(case, case.samples), batch_size=case.batch)
    found = trainer.predict(model, loader, return_predictions=False)
    return found, writer.hooks, "write_on_batch_end" in vars(writer)


def test_writers_write_on_the_first_rank_alone(pool, tmp_path):
    for name, options, world in (("one", None, 1), ("cp", {}, 3)):
        (tmp_path / name).mkdir()
        for found in pool.run(write, DOUBLE, options, tmp_path / name, world=world):
            assert found == (None, 1, False)
    expected, ours = (
        {x.name: torch.load(x) for x in (tmp_path / n).iterdir()} for n in ("one", "cp")
    )
    assert ours.keys() == expected.keys() == {"batch-0-0", "batch-0-1", "batch-0-2", "epoch"}
    for name, (predictions, indices) in expected.items():
        assert ours[name][1] == indices
        same(ours[name][0], predictions)


class NoAttention(Predicting):
    """Looks at one token at a time."""

    make = bare

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.blocks = nn.ModuleList()


def without_attention(rank: int, world: int) -> str:
    """The message; a task of the pool."""
    trainer = trainer_of(rank, world, DOUBLE, {})
    with pytest.raises(RuntimeError) as error:
        trainer.predict(NoAttention(DOUBLE), DataLoader(Text(DOUBLE, 4), batch_size=2))
    return str(error.value)


def test_a_model_without_attention_is_refused(pool):
    for message in pool.run(without_attention, world=2):
        assert "no attention call" in message


def fit_and_predict(rank: int, world: int, options: dict[str, Any] | None) -> list[Any]:
    """One Trainer and one loader for fit, validate, predict and predict again."""
    case = replace(DOUBLE, samples=4)
    model = model_of(case, bare, options is None)
    trainer = trainer_of(rank, world, case, options)
    loader = DataLoader(Text(case, 4), batch_size=2)
    trainer.fit(model, loader, loader)
    found = [trainer.predict(model, loader)]
    trainer.validate(model, loader, verbose=False)
    return [*found, trainer.predict(model, [loader, loader])]


def test_after_fit_and_of_two_loaders(pool):
    ((once, twice),) = pool.run(fit_and_predict, None, world=1)
    first, second = pool.run(fit_and_predict, {}, world=2)
    same(first[0], once, 1e-9)
    same(first[1], twice, 1e-9)
    assert second == [[None, None], [[None, None]] * 2]
    start = seeded(DOUBLE)
    assert isinstance(start, LanguageModel)
