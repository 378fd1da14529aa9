"""Finding the per-token fields of a batch, cutting them, and telling batches apart."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.data import find_fields
from lightning_cp.errors import BatchError
from lightning_cp.layout import LAYOUTS
from tests._harness.cuts import BATCH, RESETS, parts, tokens, whole

Pair = namedtuple("Pair", ["tokens", "labels"])


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "dict": (
        lambda x, y: {"input_ids": x, "labels": y},
        lambda batch: [batch["input_ids"], batch["labels"]],
    ),
    "UserDict": (
        lambda x, y: UserDict(input_ids=x, labels=y),
        lambda batch: [batch["input_ids"], batch["labels"]],
    ),
    "OrderedDict": (
        lambda x, y: OrderedDict(input_ids=x, labels=y),
        lambda batch: [batch["input_ids"], batch["labels"]],
    ),
    "tuple": (lambda x, y: (x, y), list),
    "list": (lambda x, y: [x, y], list),
    "namedtuple": (Pair, lambda batch: [batch.tokens, batch.labels]),
}


@pytest.mark.parametrize(("make", "values"), CONTAINERS.values(), ids=list(CONTAINERS))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [4, 9])
def test_containers(length: int, layout: str, make: Any, values: Any) -> None:
    given = [tokens(length), -tokens(length)]
    batch = make(*given)
    found = parts(batch, layout=layout)
    for part in found:
        assert type(part.batch) is type(batch)
        assert part.sequence.batch == BATCH
        assert part.sequence.length == length
        assert part.sequence.keys is None
        assert part.added == ()
    for number, tensor in enumerate(given):
        assert torch.equal(whole(found, lambda b, n=number: values(b)[n]), tensor)
        assert values(batch)[number] is tensor, "the batch itself is not changed"
    layouts = {part.sequence.layout for part in found}
    assert layouts == {LAYOUTS[layout](length, 2)}


def test_a_bare_tensor() -> None:
    batch = tokens(5).unsqueeze(-1).float()
    found = parts(batch)
    assert [part.batch.shape for part in found] == [(2, 3, 1), (2, 2, 1)]
    assert torch.equal(whole(found, lambda b: b), batch)
    assert find_fields(batch, None)["sequence"].dims == {"": 1}
    assert find_fields(tokens(5).T, {"": 0})["sequence"].dims == {"": 0}


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    frozen = MappingProxyType({"input_ids": tokens(4), "name": "x"})
    found = parts(frozen)
    assert found[0].batch.keys() == frozen.keys()
    assert torch.equal(found[1].batch["input_ids"], tokens(4)[:, 2:])


def test_fields_that_are_not_per_token_pass_through() -> None:
    style, names = torch.randn(BATCH, 3), ["a", "b"]
    batch = {
        "input_ids": tokens(),
        "inputs_embeds": torch.randn(BATCH, 8, 5),
        "loss_mask": torch.ones(BATCH, 8),
        "style": style,
        "names": names,
        "count": 8,
        "nothing": None,
    }
    for part in parts(batch):
        assert part.dims == {"input_ids": 1, "inputs_embeds": 1, "loss_mask": 1}
        assert part.batch["style"] is style
        assert part.batch["names"] is names
        assert part.batch["count"] == 8
        assert part.batch["nothing"] is None
        assert list(part.batch) == list(batch)
        assert part.batch["inputs_embeds"].shape == (BATCH, 4, 5)


def test_declared_dims() -> None:
    batch = {
        "input_ids": tokens(),
        "by_time": torch.arange(8 * 3).reshape(8, 3),
        "last": torch.arange(3 * 8).reshape(1, 3, 8),
        "square": torch.zeros(8, 8),
    }
    declared = {"by_time": 0, "last": -1, "square": None, "absent": 1}
    fields = find_fields(batch, declared)["sequence"]
    assert fields.dims == {"by_time": 0, "last": 2, "input_ids": 1}
    found = parts(batch, sequence_dims=declared)
    assert torch.equal(whole(found, lambda b: b["by_time"], 0), batch["by_time"])
    assert torch.equal(whole(found, lambda b: b["last"], 2), batch["last"])
    assert found[0].batch["square"] is batch["square"]
    only = find_fields((tokens(), torch.zeros(2, 3)), {"0": 1})["sequence"]
    assert (only.dims, only.length, only.batch) == ({"0": 1}, 8, BATCH)
    undone = find_fields(
        {"tokens": tokens(), "input_ids": torch.zeros(1, 3)}, {"tokens": 1, "input_ids": None}
    )
    assert undone["sequence"].dims == {"tokens": 1}


@pytest.mark.parametrize(
    ("batch", "declared"),
    [
        ({"by_time": torch.zeros(8, 3), "tokens": tokens()}, {"by_time": 0, "tokens": 1}),
        ({"tokens": tokens(), "by_time": torch.zeros(8, 3)}, {"tokens": 1, "by_time": 0}),
    ],
)
def test_the_number_of_rows_comes_from_a_field_with_rows(batch: Any, declared: Any) -> None:
    assert find_fields(batch, declared)["sequence"].batch == BATCH


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no field": (
        {"style": torch.zeros(2, 3)},
        None,
        r"no field .* style \(2, 3\).*sequence_dims=.*well-known names input_ids",
    ),
    "no tensors": ({"names": ["a"]}, None, "no field of the batch.*: no tensors; name"),
    "lengths differ": (
        {"input_ids": tokens(8), "labels": tokens(7)},
        None,
        r"different lengths \{'input_ids': 8, 'labels': 7\}.*None for",
    ),
    "labels per row, as many rows as tokens": (
        {"input_ids": tokens(2), "labels": torch.zeros(2).long()},
        None,
        r"'labels' of shape \(2,\).*length 2.*sequence_dims=\{'labels': 0\}.*\{'labels': None\}",
    ),
    "unknown field of the length": (
        {"input_ids": tokens(8), "speaker": torch.zeros(2, 8)},
        None,
        r"'speaker' of shape \(2, 8\).*sequence_dims=\{'speaker': 1\} to cut it",
    ),
    "tuple with labels per row": (
        (tokens(8), torch.zeros(2)),
        None,
        r"not all start with the same \[B, S\] is ambiguous: 0 \(2, 8\), 1 \(2,\); say",
    ),
    "tuple of lengths": ((tokens(8), tokens(7)), None, "ambiguous"),
    "a vector": (torch.zeros(8), None, r"ambiguous: tensor \(8,\)"),
    "no such dim": ({"tokens": tokens(8)}, {"tokens": 2}, r"dim 2 of 'tokens', .* \(2, 8\)"),
    "no such negative dim": ({"tokens": tokens(8)}, {"tokens": -3}, "dim -3 of 'tokens'"),
    "empty": ({"input_ids": torch.zeros(2, 0)}, None, r"empty: input_ids \(2, 0\)"),
    "string": ("text", None, "a batch of type str cannot be cut.*return a dict"),
    "object": (object(), None, "a batch of type object cannot be cut"),
    "number": (3, None, "a batch of type int cannot be cut"),
}


@pytest.mark.parametrize(("batch", "declared", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refusals_say_shape_rule_and_way_out(batch: Any, declared: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        find_fields(batch, declared)


def test_labels_per_row_pass_through_where_they_cannot_be_mistaken() -> None:
    labels = torch.tensor([0, 1])
    for part in parts({"input_ids": tokens(8), "labels": labels}):
        assert part.batch["labels"] is labels
    square = {"input_ids": tokens(2), "labels": torch.tensor([[1, 2], [3, 4]])}
    assert torch.equal(whole(parts(square), lambda b: b["labels"]), square["labels"])
    for part in parts({"input_ids": tokens(2), "labels": labels}, sequence_dims={"labels": None}):
        assert part.batch["labels"] is labels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 2, 7, 10])
def test_short_sequences_are_filled_with_dummies(length: int, layout: str) -> None:
    batch = {
        "input_ids": tokens(length),
        "labels": tokens(length),
        "shift_labels": tokens(length),
        "attention_mask": torch.ones(BATCH, length, dtype=torch.bool),
        "position_ids": torch.arange(length).expand(BATCH, -1) + 100,
    }
    found = parts(batch, 3, layout=layout)
    padded = max(length, 6)
    assert sum(part.sequence.layout.size(rank) for rank, part in enumerate(found)) == padded
    for rank, part in enumerate(found):
        dummy = ~part.sequence.real(rank)
        assert dummy.numel() >= 2
        fills = {"input_ids": 0, "labels": -100, "shift_labels": -100, "attention_mask": 0}
        for name, fill in {**fills, "position_ids": 0}.items():
            assert part.batch[name].shape == (BATCH, dummy.numel())
            assert part.batch[name].dtype == batch[name].dtype
            assert (part.batch[name][:, dummy] == fill).all(), name
        assert part.sequence.keys is None, "dummies are no padding of the batch"
        assert not part.sequence.visible_keys(rank)[:, dummy].any()
        assert part.sequence.visible_keys(rank)[:, ~dummy].all()
    for name, tensor in batch.items():
        assert torch.equal(whole(found, lambda b, n=name: b[n]), tensor)


@pytest.mark.parametrize(
    ("length", "multiple", "padded"), [(7, 4, 8), (8, 4, 8), (9, 16, 16), (1, 4, 8), (5, None, 6)]
)
def test_pad_to_a_multiple(length: int, multiple: int | None, padded: int) -> None:
    found = parts({"input_ids": tokens(length)}, 3, pad_to_multiple_of=multiple)
    assert found[0].sequence.layout.length == padded
    assert found[0].sequence.length == length
    assert torch.equal(whole(found, lambda b: b["input_ids"]), tokens(length))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_becomes_a_span_per_row(dtype: torch.dtype) -> None:
    rows = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0] * 5]
    mask = torch.tensor(rows).to(dtype)
    batch = {"input_ids": tokens(5, batch=5), "attention_mask": mask}
    found = parts(batch)
    for rank, part in enumerate(found):
        assert part.sequence.keys == ((0, 5), (0, 3), (2, 5), (1, 3), (0, 0))
        positions = part.sequence.layout.positions(rank)
        assert torch.equal(part.sequence.visible_keys(rank), mask[:, positions] != 0)
    ones = {"input_ids": tokens(5), "attention_mask": torch.ones(2, 5)}
    assert parts(ones)[0].sequence.keys is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]),
            "attention_mask of row 1 hides positions betw",
        ),
        (torch.ones(2, 4, 4, 4), r"\(2, 4, 4, 4\).*padding \[B, S\].*causality comes from"),
        (torch.ones(2, 4, 4), r"attention_mask of shape \(2, 4, 4\)"),
    ],
)
def test_other_masks_are_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        parts({"input_ids": tokens(4), "attention_mask": mask})


@pytest.mark.parametrize("dims", [None, {"position_ids": 2}])
def test_positions_that_start_anew_need_a_word(dims: Any) -> None:
    ids = RESETS if dims is None else RESETS.expand(3, -1, -1)
    batch = {"input_ids": tokens(), "position_ids": ids}
    with pytest.raises(BatchError, match=r"start anew within a row.*documents='none' lets them"):
        parts(batch, sequence_dims=dims)
    found = parts(batch, sequence_dims=dims, documents="none")
    assert torch.equal(whole(found, lambda b: b["position_ids"], ids.ndim - 1), ids)
    assert found[0].sequence.documents is None


DECLARED = [{"documents": "position_ids"}, {"as_transformers": True}]


@pytest.mark.parametrize("rules", DECLARED)
@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        (RESETS, ((0, 8), (0, 3, 8))),
        (RESETS[1:].expand(2, -1), (0, 3, 8)),
        (RESETS[1:], (0, 3, 8)),
        (RESETS[:1].expand(2, -1) + 5, None),
        (torch.tensor([[0, 1, 1, 2, 5, 6, 7, 7]] * 2), (0, 2, 4, 7, 8)),
    ],
)
def test_documents_begin_where_positions_do_not_continue(
    positions: Tensor, documents: Any, rules: Any
) -> None:
    found = parts({"input_ids": tokens(), "position_ids": positions}, **rules)
    assert all(part.sequence.documents == documents for part in found)
    assert all(part.sequence.as_transformers == ("documents" not in rules) for part in found)


def test_transformers_looks_for_documents_only_without_an_attention_mask() -> None:
    batch = {"input_ids": tokens(), "position_ids": RESETS}
    masked = {**batch, "attention_mask": torch.ones(2, 8)}
    assert parts(masked, as_transformers=True)[0].sequence.documents is None
    declared = parts(masked, as_transformers=True, documents="position_ids")[0].sequence
    assert (declared.documents, declared.as_transformers) == (((0, 8), (0, 3, 8)), False)
    ignored = parts(batch, as_transformers=True, documents="none")[0].sequence
    assert (ignored.documents, ignored.as_transformers) == (None, False)


@pytest.mark.parametrize("extra", [{}, {"position_ids": RESETS.expand(3, -1, -1)}])
def test_declared_documents_need_positions(extra: Any) -> None:
    dims = {"position_ids": 2} if extra else None
    with pytest.raises(BatchError, match=r"documents='position_ids' needs .* \[B, S\]"):
        parts({"input_ids": tokens(), **extra}, sequence_dims=dims, documents="position_ids")


@pytest.mark.parametrize("ids", [[5, 6, 7, 8], [0, 0, 0, 0], [0, 0, 1, 2]])
def test_positions_that_do_not_fall_are_one_document(ids: list[int]) -> None:
    batch = {"input_ids": tokens(4), "position_ids": torch.tensor([ids, ids])}
    assert torch.equal(whole(parts(batch), lambda b: b["position_ids"]), batch["position_ids"])


@pytest.mark.parametrize("length", [8, 1])
def test_positions_are_added_only_where_the_model_takes_them(length: int) -> None:
    batch = {"input_ids": tokens(length)}
    assert all("position_ids" not in part.batch for part in parts(batch, layout="zigzag"))
    for rank, part in enumerate(parts(batch, layout="zigzag", takes_positions=True)):
        assert part.added == ("position_ids",)
        local = part.sequence.layout.positions(rank)
        expected = torch.where(local < length, local, 0).expand(BATCH, -1)
        assert torch.equal(part.batch["position_ids"], expected)
        assert list(batch) == ["input_ids"], "the batch itself is not changed"
    mine = {**batch, "position_ids": torch.full((BATCH, length), 7)}
    for part in parts(mine, takes_positions=True):
        assert part.added == ()
        assert part.batch["position_ids"][:, 0].tolist()[0] in (7, 0)
    for part in parts((tokens(length),), takes_positions=True):
        assert part.added == ()
        assert len(part.batch) == 1


def test_cut_is_differentiable_and_copies() -> None:
    embeds = torch.randn(BATCH, 5, 3, requires_grad=True)
    found = parts({"inputs_embeds": embeds}, 3)
    for rank, part in enumerate(found):
        (part.batch["inputs_embeds"].sum() * (rank + 1)).backward()
    assert embeds.grad is not None
    assert embeds.grad[0, :, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]
    ids = tokens(6)
    parts({"input_ids": ids})[0].batch["input_ids"].zero_()
    assert torch.equal(ids, tokens(6))
