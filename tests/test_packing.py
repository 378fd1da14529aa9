"""Rows of documents: what an epoch holds, at any number of devices and workers; resuming."""

import pickle
import random
import warnings
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_cp.data import PackedDataset, Packing, PackingCollate
from lightning_cp.data.packing.rounds import Document, Part, rounds
from lightning_cp.errors import BatchError, ConfigError, ContextParallelWarning
from tests._harness.packing import (
    ODD,
    Device,
    check_epoch,
    corpus,
    equal,
    loaded,
    numbered,
    pair_counts,
)

IGNORED = -100


class Stream(IterableDataset[Any]):
    """Documents one after the other; workers take turns, as in many streams."""

    def __init__(self, documents: list[Any]) -> None:
        self._documents = documents

    def __iter__(self) -> Any:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return islice(iter(self._documents), start, None, step)


class Mapped(Dataset[Any]):
    """Documents by number, with what was read."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.read = documents, []

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return {"input_ids": self.documents[index], "text": "left out"}


def plain_rounds(lengths: Any, packing: Packing, devices: int = 1) -> list[list[list[Any]]]:
    documents = (Document(key, length) for key, length in enumerate(lengths))
    return [
        [[(part.key, part.start, part.stop) for part in row] for row in found]
        for found in rounds(documents, packing, devices)
    ]


def test_documents_fill_rows_in_order():
    assert plain_rounds([3, 6, 5, 2, 1], Packing(8)) == [
        [[(0, 0, 3), (2, 0, 5)]],
        [[(1, 0, 6), (3, 0, 2)]],
        [[(4, 0, 1)]],
    ]


def test_only_a_bounded_number_of_documents_is_looked_at():
    """With two, the first row cannot be filled by the fourth document."""
    found = plain_rounds([3, 6, 7, 5], Packing(8, buffer=2))
    assert found == [[[(0, 0, 3)]], [[(1, 0, 6)]], [[(2, 0, 7)]], [[(3, 0, 5)]]]
    read = []
    documents = (read.append(key) or Document(key, 8) for key in range(100))
    next(rounds(documents, Packing(8, buffer=5), 3))
    assert len(read) == 15


def test_rows_of_a_round_share_the_work():
    """Four halves and a whole on three devices: the whole one alone, the halves in pairs."""
    (first,) = plain_rounds([8, 4, 4, 4, 4], Packing(8), devices=3)
    assert first == [[(0, 0, 8)], [(1, 0, 4), (3, 0, 4)], [(2, 0, 4), (4, 0, 4)]]


def test_long_documents_wait_for_others():
    """Held back until there is one for each of two devices."""
    lengths = [9, 2, 2, 2, 2, 2, 2, 2, 10, 2]
    now = plain_rounds(lengths, Packing(10, buffer=2), devices=2)
    later = plain_rounds(lengths, Packing(10, buffer=2, hold_longer_than=8), devices=2)
    longest = [[max(stop - start for _, start, stop in row) for row in found] for found in now]
    assert longest[0] == [9, 2]
    longest = [[max(stop - start for _, start, stop in row) for row in found] for found in later]
    assert longest == [[2, 2], [10, 9], [2, 2]]


def test_devices_wait_less_for_each_other_with_documents_of_one_length():
    """Over a long-tailed corpus: the longest work of every round, over what is even."""
    dice = random.Random(0)
    lengths = [max(1, int(dice.lognormvariate(4, 1.5))) for _ in range(8000)]

    def excess(**options: Any) -> float:
        work = [
            [sum((stop - start) ** 2 for _, start, stop in row) for row in found]
            for found in plain_rounds(lengths, Packing(4096, **options), devices=4)
        ]
        assert len(work) == 82, "no more rows"
        return sum(map(max, work)) * 4 / sum(map(sum, work))

    assert excess(hold_longer_than=512) < 1.2
    assert excess() > 1.7


def test_held_documents_are_not_lost_at_the_end():
    packing = Packing(10, buffer=2, hold_longer_than=4)
    for count in range(1, 6):
        found = plain_rounds([9] * count, packing, devices=3)
        held = sorted(part for rows in found for row in rows for part in row)
        assert sum(stop - start for _, start, stop in held) == 9 * count
        assert all(all(rows) for rows in found)


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_no_device_runs_out_of_rows(devices):
    """Halves of documents are given to rows that would be empty."""
    for count in range(1, 12):
        lengths = [random.Random(count).randint(2, 40) for _ in range(count)]
        for rows in plain_rounds(lengths, Packing(40), devices):
            assert sum(map(bool, rows)) == min(devices, len(rows))
            if sum(lengths) >= 2 * devices:
                assert all(rows)


def test_halves_keep_their_targets():
    (rows,) = list(rounds([Document(0, 5)], Packing(8), 2))
    assert rows == [[Part(0, 0, 3, False)], [Part(0, 3, 5, True)]]


def test_fewer_tokens_than_devices_leave_an_ignored_token():
    data = PackedDataset([[7]], 8).placed(Device(2, 1))
    (row,) = data
    assert {name: x.tolist() for name, x in row.items()} == {
        "input_ids": [[0]],
        "labels": [[IGNORED]],
        "position_ids": [[0]],
    }


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 1000])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("source", ["list", "mapped", "lengths", "stream"])
def test_every_token_and_target_once(source, devices, tokens):
    documents = numbered(ODD)
    data: Any = {"list": documents, "stream": Stream(documents)}.get(source, Mapped(documents))
    lengths = ODD if source == "lengths" else None
    packing = Packing(tokens, buffer=4, hold_longer_than=6)
    packed = PackedDataset(data, packing, lengths=lengths)
    rows = [list(packed.placed(Device(devices, device))) for device in range(devices)]
    assert len({len(own) for own in rows}) == 1
    flat = [row for own in rows for row in own]
    assert all(row["input_ids"].shape[1] <= tokens for row in flat)
    real = [row for row in flat if not stands_for_nothing(row)]
    assert len(real) == len(flat) or len(real) == sum(ODD) > tokens == 1
    check_epoch(real, ODD)


def stands_for_nothing(row: Any) -> bool:
    """Whether it is the row of a device for which no token was left; token 0 has a target."""
    return row["input_ids"].tolist() == [[0]] and row["labels"].tolist() == [[IGNORED]]


@pytest.mark.parametrize("source", ["mapped", "stream"])
def test_workers_take_turns(source):
    """The same rows in the same order, also from a stream that splits itself by workers."""
    documents = numbered(ODD)
    data = Stream(documents) if source == "stream" else documents
    packed = PackedDataset(data, 16).placed(Device(2, 1))
    expected = list(packed)
    assert len(expected) > 3
    for workers in (1, 2):
        assert equal(loaded(packed, workers), expected)


def test_a_real_corpus():
    """Bytes of files, on three devices, with two workers each."""
    documents = corpus()
    longest = max(map(len, documents))
    assert sum(map(len, documents)) > 2 << 20
    assert longest > 1 << 16
    packed = PackedDataset(documents, 1 << 16, lengths=list(map(len, documents)), shuffle=True)
    rows = [row for n in range(3) for row in loaded(packed.placed(Device(3, n)), 2)]
    found = sum_counts((row["input_ids"], row["labels"]) for row in rows)
    texts = [torch.frombuffer(bytearray(x), dtype=torch.uint8).long() for x in documents if x]
    ends = torch.tensor([IGNORED])
    assert torch.equal(found, sum_counts((x, torch.cat([x[1:], ends])) for x in texts))
    full = sum(row["input_ids"].numel() for row in rows) / (len(rows) << 16)
    assert full > 0.9


def sum_counts(pairs: Any) -> torch.Tensor:
    tokens, targets = zip(*((a.flatten(), b.flatten()) for a, b in pairs), strict=True)
    return pair_counts(torch.cat(tokens), torch.cat(targets))


def test_epochs_have_orders_of_their_own_and_seeds_repeat_them():
    documents = numbered([4] * 30)
    make = partial(PackedDataset, documents, 8, shuffle=True)
    one, other = make(seed=3), make(seed=4)
    first = list(one)
    assert equal(list(one), first)
    assert equal(list(make(seed=3)), first)
    assert not equal(list(other), first)
    one.set_epoch(1)
    second = list(one)
    assert not equal(second, first)
    assert equal(loaded(one, 1), second)
    check_epoch(second, [4] * 30)


def test_persistent_workers_see_the_epoch():
    packed = PackedDataset(numbered([4] * 30), 8, shuffle=True)
    loader = DataLoader(
        packed,
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    first = list(loader)
    packed.set_epoch(1)
    second = list(loader)
    assert not equal(second, first)
    assert equal(second, list(packed))


@pytest.mark.parametrize("workers", [0, 2])
def test_begins_behind_rows_that_were_used(workers):
    """Whatever the number of workers that made them."""
    packed = PackedDataset(numbered(ODD), 8)
    rows = list(packed)
    for taken in (0, 1, 2, len(rows)):
        packed.begin(0, taken)
        assert equal(loaded(packed, workers), rows[taken:])


def test_states_of_an_iteration():
    """What stateful loaders ask of the dataset in each worker."""
    packed = PackedDataset(numbered(ODD), 8, shuffle=True)
    packed.set_epoch(2)
    rows, own = list(packed), iter(packed)
    taken = [next(own) for _ in range(3)]
    state = pickle.loads(pickle.dumps(packed.state_dict()))
    assert equal(taken, rows[:3])
    other = PackedDataset(numbered(ODD), 8, shuffle=True)
    other.load_state_dict(state)
    rest = iter(other)
    assert equal([next(rest)], rows[3:4])
    again = PackedDataset(numbered(ODD), 8, shuffle=True)
    again.load_state_dict(other.state_dict())
    assert equal(list(again), rows[4:])
    assert not equal(list(again), rows[4:]), "it holds for one iteration"
    with pytest.raises(ConfigError, match=r"the state is of rows made with Packing\(tokens=8"):
        PackedDataset(numbered(ODD), 9, shuffle=True).load_state_dict(state)


def test_with_lengths_only_own_documents_are_read():
    data = Mapped(numbered(ODD))
    packed = PackedDataset(data, 16, lengths=np.array(ODD)).placed(Device(2, 0))
    tokens = torch.cat([row["input_ids"][0] for row in packed])
    own = {key for key, x in enumerate(data.documents) if torch.isin(x, tokens).any()}
    assert set(data.read) == own
    assert len(own) < len(ODD) - 2
    data.read.clear()
    packed.begin(0, 3)
    next(iter(packed))
    assert len(data.read) < 6, "rows that are skipped are not read"
    wrong = PackedDataset(data, 16, lengths=[*ODD[:-1], 9])
    with pytest.raises(BatchError, match="document 15 has 7 tokens, and lengths says 9"):
        list(wrong)


def test_long_documents():
    document = [torch.arange(20)]
    assert [row["input_ids"].shape[1] for row in PackedDataset(document, 8)] == [8, 8, 4]
    cut = PackedDataset(document, Packing(8, long="truncate"))
    with pytest.warns(ContextParallelWarning, match="20 tokens, a row 8: the last 12 are left out"):
        (row,) = cut
    assert row["labels"].tolist() == [[1, 2, 3, 4, 5, 6, 7, IGNORED]]
    with warnings.catch_warnings(), pytest.raises(BatchError, match="document 0 has 20 tokens"):
        list(PackedDataset(document, Packing(8, long="refuse")))
    exact = PackedDataset([torch.arange(8)], Packing(8, long="refuse"))
    assert [row["labels"].tolist() for row in exact] == [[[1, 2, 3, 4, 5, 6, 7, IGNORED]]]


def test_labels_of_documents():
    """Prompts that are not to be predicted, further fields, and the fields of transformers."""
    documents = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 3], "weight": [0.1, 0.2, 0.3]},
        {"input_ids": [4, 5], "labels": [4, 5], "attention_mask": [1, 1], "weight": [0.4, 0.5]},
    ]
    (row,) = PackedDataset(documents, Packing(8, labels="transformers"), fields=["weight"])
    assert row["labels"].tolist() == [[IGNORED, IGNORED, 3, IGNORED, 5]]
    assert row["shift_labels"].tolist() == [[IGNORED, 3, IGNORED, 5, IGNORED]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert torch.equal(row["weight"], torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]))
    (aligned,) = PackedDataset(documents, 8)
    assert set(aligned) == {"input_ids", "labels", "position_ids"}
    assert torch.equal(aligned["labels"], row["shift_labels"])


def test_a_collate_function_joins_the_documents_of_a_batch():
    documents = [[1, 2, 3], b"", torch.tensor([4]), np.array([5, 6], dtype=np.uint16)]
    loader = DataLoader(documents, batch_size=4, collate_fn=PackingCollate())
    (row,) = loader
    assert {name: x.tolist() for name, x in row.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6]],
        "labels": [[2, 3, IGNORED, IGNORED, 6, IGNORED]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
    }
    with pytest.raises(BatchError, match="4 documents of a batch have 6 tokens together"):
        PackingCollate(tokens=5)(documents)
    with pytest.raises(BatchError, match="all 1 documents of a batch are empty"):
        PackingCollate()([[]])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, "a document has the fields text, but not 'input_ids'"),
        ([[1, 2]], r"input_ids of a document has shape \(1, 2\)"),
        ([0.5], "tokens are integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "different lengths"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "hides tokens"),
    ],
)
def test_what_is_no_document_is_refused(sample, message):
    with pytest.raises(BatchError, match=message):
        list(PackedDataset([sample], 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens=0 must be a positive number of tokens"),
        ({"tokens": 8, "buffer": True}, "buffer=True must be a positive number of documents"),
        ({"tokens": 8, "long": "drop"}, "long='drop' is unknown; use one of split, truncate"),
        ({"tokens": 8, "labels": "shifted"}, "labels='shifted' is unknown"),
        ({"tokens": 8, "hold_longer_than": -1}, "hold_longer_than=-1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        Packing(**options)


def test_streams_are_not_shuffled():
    with pytest.raises(ConfigError, match="Stream is iterable"):
        PackedDataset(Stream([]), 8, shuffle=True)
    with pytest.raises(ConfigError, match="1 lengths for 2 documents"):
        PackedDataset([[1], [2]], 8, lengths=[1])
