"""Batches in containers within containers, and what is not a tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_cp.data import Cut
from lightning_cp.data.containers import items, rebuilt
from lightning_cp.errors import BatchError
from tests._harness.cuts import BATCH, RESETS, parts, tokens, whole


class Sample(NamedTuple):
    """Names that are known beside one that is not per token."""

    input_ids: Tensor
    labels: Tensor
    id: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """A frozen dataclass with a place for positions."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    source: str = "a file"


@dataclass
class Whole:
    """A dataclass around a mapping."""

    inputs: Any
    id: Tensor


NUMBERS = torch.tensor([4, 7, 1])
NESTED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str]] = {
    "BatchEncoding": (
        lambda x, y: BatchEncoding({"input_ids": x, "labels": y, "id": NUMBERS}),
        "input_ids",
        "labels",
    ),
    "NamedTuple": (lambda x, y: Sample(x, y, NUMBERS), "input_ids", "labels"),
    "frozen dataclass": (Inputs, "input_ids", "labels"),
    "dict in dict": (
        lambda x, y: {"inputs": {"input_ids": x}, "targets": {"labels": y, "id": NUMBERS}},
        "inputs.input_ids",
        "targets.labels",
    ),
    "dict in tuple": (
        lambda x, y: ({"input_ids": x, "labels": y}, NUMBERS),
        "0.input_ids",
        "0.labels",
    ),
    "tuple in dict": (lambda x, y: {"id": NUMBERS, "pair": (x, [y])}, "pair.0", "pair.1.0"),
    "dict in dataclass": (
        lambda x, y: Whole({"input_ids": x, 3: {"labels": y}}, NUMBERS),
        "inputs.input_ids",
        "inputs.3.labels",
    ),
    "BatchEncoding in list": (
        lambda x, y: [BatchEncoding({"input_ids": x}), {"labels": y}],
        "0.input_ids",
        "1.labels",
    ),
}


def kinds(value: Any) -> Any:
    """Types of a nested container, without its tensors."""
    if isinstance(value, Mapping):
        return type(value), {key: kinds(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(child) for child in value]
    return type(value)


@pytest.mark.parametrize(("make", "tokens_at", "labels_at"), NESTED.values(), ids=list(NESTED))
def test_nested_containers(make: Any, tokens_at: str, labels_at: str) -> None:
    given = {tokens_at: tokens(9, 3), labels_at: -tokens(9, 3)}
    batch = make(*given.values())
    dims = dict.fromkeys(given, 1) if tokens_at == "pair.0" else None
    found = parts(batch, 3, layout="zigzag", sequence_dims=dims)
    for part in found:
        assert kinds(part.batch) == kinds(batch)
        assert part.dims == dict.fromkeys(given, 1)
        assert (part.sequence.length, part.sequence.batch) == (9, 3)
        for name, value in items(batch).items():
            if name not in given:
                assert items(part.batch)[name] is value, name
    for name, tensor in given.items():
        assert torch.equal(whole(found, lambda b, n=name: items(b)[n]), tensor)
        assert items(batch)[name] is tensor, "the batch itself is not changed"


def test_what_is_no_tensor_stays_as_it_is() -> None:
    passed = {"names": ["a", "b"], "nothing": None, "count": 8, "meta": {"seen": (1, 2.5), "x": []}}
    for part in parts({"input_ids": tokens(), **passed}):
        for name, value in passed.items():
            assert part.batch[name] is value, name
    assert items({"a": {"b": [1, 2], "c": "text"}, "d": [None]}) == {
        "a.b": [1, 2],
        "a.c": "text",
        "d": [None],
    }


def test_positions_are_added_beside_the_tokens() -> None:
    def added(batch: Any) -> list[Cut]:
        return parts(batch, layout="zigzag", takes_positions=True)

    for rank, part in enumerate(added({"inputs": {"input_ids": tokens()}, "labels": tokens()})):
        assert part.added == ("inputs.position_ids",)
        assert list(part.batch) == ["inputs", "labels"]
        expected = part.sequence.layout.positions(rank).expand(BATCH, -1)
        assert torch.equal(part.batch["inputs"]["position_ids"], expected)
    for rank, part in enumerate(added(Inputs(tokens(), tokens()))):
        assert part.added == ("position_ids",)
        expected = part.sequence.layout.positions(rank).expand(BATCH, -1)
        assert torch.equal(part.batch.position_ids, expected)
    pair = {"query": {"input_ids": tokens()}, "answer": {"input_ids": tokens()}}
    assert added(pair)[0].added == ("query.position_ids", "answer.position_ids")
    assert added({"input_ids": tokens(), "position_ids": None})[0].added == ("position_ids",)
    assert added(({"input_ids": tokens()}, NUMBERS))[0].added == ("0.position_ids",)
    assert added(Sample(tokens(), tokens(), NUMBERS))[0].added == ()


def test_nested_masks_positions_and_fills_are_known_by_their_last_name() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    inner = {"input_ids": tokens(5), "labels": tokens(5), "attention_mask": mask}
    found = parts({"inputs": inner}, 3)
    assert found[0].sequence.keys == ((0, 3), (1, 5))
    assert found[2].batch["inputs"]["labels"][:, -1].tolist() == [-100, -100]
    packed = {"inputs": {"input_ids": tokens(), "position_ids": RESETS}}
    assert parts(packed, documents="position_ids")[0].sequence.documents == ((0, 8), (0, 3, 8))
    with pytest.raises(BatchError, match="start anew"):
        parts(packed)
    with pytest.raises(BatchError, match=r"a\.attention_mask, b\.attention_mask hide different"):
        parts({"a": inner, "b": {"attention_mask": mask.flip(0)}})
    same = {"a": inner, "b": {"attention_mask": mask.clone()}}
    assert parts(same)[0].sequence.keys == ((0, 3), (1, 5))
    other = {"a": packed["inputs"], "b": {"position_ids": RESETS.flip(0)}}
    with pytest.raises(BatchError, match=r"a\.position_ids, b\.position_ids differ"):
        parts(other, documents="none")


def test_nested_names_are_declared_in_full() -> None:
    batch = {
        "input_ids": tokens(),
        "more": {"scores": torch.zeros(BATCH, 8), "keys": {7: tokens(3)}},
    }
    with pytest.raises(BatchError, match=r"'more\.scores' of shape .*\{'more\.scores': 1\}"):
        parts(batch)
    found = parts(batch, sequence_dims={"more.scores": 1})
    assert found[0].batch["more"]["scores"].shape == (BATCH, 4)
    assert found[0].batch["more"]["keys"] is batch["more"]["keys"]
    with pytest.raises(BatchError, match=r"two values .* are called 'a\.b'"):
        items({"a.b": 1, "a": {"b": 2}})


def test_a_model_output_is_rebuilt() -> None:
    output = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.zeros(1, 2, 3))
    new = rebuilt(output, {**items(output), "logits": torch.ones(1, 4, 3)})
    assert type(new) is CausalLMOutput
    assert new.loss is output.loss
    assert new.logits.shape == new["logits"].shape == (1, 4, 3)
    assert output.logits.shape == (1, 2, 3)
    assert rebuilt(output, items(output)) is output
