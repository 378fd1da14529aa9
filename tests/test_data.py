"""Finding the per-token fields of a batch, cutting them, and telling batches apart."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_cp.data import Cut, cut, find_fields
from lightning_cp.data.containers import items, rebuilt
from lightning_cp.data.content import content_code, shapes_of
from lightning_cp.data.cut import Rules
from lightning_cp.errors import BatchError
from lightning_cp.layout import LAYOUTS

Pair = namedtuple("Pair", ["tokens", "labels"])
BATCH = 2


def tokens(length: int = 8, batch: int = BATCH) -> Tensor:
    """Different numbers everywhere, and no zero."""
    return torch.arange(1, batch * length + 1).reshape(batch, length)


def parts(batch: Any, world: int = 2, **options: Any) -> list[Cut]:
    rules = Rules(**{"layout": "contiguous", **options})
    return [cut(batch, rules, rank=rank, world=world) for rank in range(world)]


def whole(found: list[Cut], get: Callable[[Any], Tensor], dim: int = 1) -> Tensor:
    """The cut field put together again, without dummies."""
    sequence = found[0].sequence
    joined = sequence.layout.unshard([get(part.batch) for part in found], dim=dim)
    return joined.narrow(dim, 0, sequence.length)


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
    assert find_fields(batch, None).dims == {"": 1}
    assert find_fields(tokens(5).T, {"": 0}).dims == {"": 0}


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
        assert part.fields.dims == {"input_ids": 1, "inputs_embeds": 1, "loss_mask": 1}
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
    fields = find_fields(batch, declared)
    assert fields.dims == {"by_time": 0, "last": 2, "input_ids": 1}
    found = parts(batch, sequence_dims=declared)
    assert torch.equal(whole(found, lambda b: b["by_time"], 0), batch["by_time"])
    assert torch.equal(whole(found, lambda b: b["last"], 2), batch["last"])
    assert found[0].batch["square"] is batch["square"]
    only = find_fields((tokens(), torch.zeros(2, 3)), {"0": 1})
    assert (only.dims, only.length, only.batch) == ({"0": 1}, 8, BATCH)
    undone = find_fields(
        {"tokens": tokens(), "input_ids": torch.zeros(1, 3)}, {"tokens": 1, "input_ids": None}
    )
    assert undone.dims == {"tokens": 1}


@pytest.mark.parametrize(
    ("batch", "declared"),
    [
        ({"by_time": torch.zeros(8, 3), "tokens": tokens()}, {"by_time": 0, "tokens": 1}),
        ({"tokens": tokens(), "by_time": torch.zeros(8, 3)}, {"tokens": 1, "by_time": 0}),
    ],
)
def test_the_number_of_rows_comes_from_a_field_with_rows(batch: Any, declared: Any) -> None:
    assert find_fields(batch, declared).batch == BATCH


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


RESETS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])


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


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_content_code_sees_every_element_and_the_order(dtype: torch.dtype) -> None:
    base = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    code = content_code({"x": base})
    assert code == content_code({"x": base.clone()})
    assert code == content_code({"x": base.mT.contiguous().mT}), "strides do not matter"
    assert 0 <= code < 2**32
    seen = {code}
    for index in range(base.numel()):
        other = base.clone()
        other.view(-1)[index] = base.logical_not().view(-1)[index]
        seen.add(content_code({"x": other}))
    assert len(seen) == base.numel() + 1
    assert content_code({"x": base.flip(-1)}) != code
    assert content_code({"x": base.flip(0)}) == content_code({"x": base.flip(0).clone()})


def test_content_code_of_whole_batches() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    base = content_code({"x": x, "y": y})
    assert base == content_code({"x": x, "y": y, "name": "anything"})
    different: list[Mapping[str, Tensor] | tuple[Tensor, ...]] = [
        {"x": y, "y": x},
        {"x": x, "z": y},
        {"x": x},
        {"x": x, "y": y + 2**-22},
        {"x": x, "y": -y},
        (x, y),
    ]
    codes = [base, *map(content_code, different), content_code((y, x))]
    assert len(set(codes)) == len(codes)
    assert content_code({"x": torch.tensor(0.0)}) != content_code({"x": torch.tensor(-0.0)})
    nan = torch.tensor([float("nan")])
    assert content_code({"x": nan}) == content_code({"x": nan.clone()})
    assert content_code({"x": torch.zeros(0)}) == content_code({"x": torch.zeros(0)})


def test_shapes_are_readable() -> None:
    batch = {"input_ids": tokens(), "name": "x", "style": torch.zeros(2)}
    assert shapes_of(batch) == "input_ids (2, 8) torch.int64, style (2,) torch.float32"
    assert shapes_of(tokens()) == "tensor (2, 8) torch.int64"
    assert shapes_of((torch.zeros(1),)) == "0 (1,) torch.float32"


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
        assert part.fields.dims == dict.fromkeys(given, 1)
        assert (part.fields.length, part.fields.batch) == (9, 3)
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
