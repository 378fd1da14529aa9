"""Rows of token files: every rank reads its own tokens, and together they are the whole rows."""

import pickle
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_cp.data import PackedDataset, Packing, TokenDataset
from lightning_cp.data.collate import ShardedBatch, Uncut
from lightning_cp.data.packing.files import TokenFiles
from lightning_cp.diagnostics.trace import MemoryTracker
from lightning_cp.errors import ConfigError
from tests._harness.grid import rotated
from tests._harness.packing import (
    ODD,
    Device,
    check_epoch,
    corpus,
    equal,
    loaded,
    numbered,
    pair_counts,
    share,
    whole_rows,
    write,
)

LAYOUTS = ("balanced", "zigzag", "contiguous", "per_document_zigzag")
LENGTHS = [len(text) for text in corpus()]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of numbered documents as long as those of the corpus."""
    return write(tmp_path_factory.mktemp("large"), numbered(LENGTHS))


@contextmanager
def reads(data: TokenDataset) -> Any:
    """What is read of the files: document, start, stop."""
    found: list[tuple[int, int, int]] = []
    files = data._files
    read = files.read

    def watched(key: int, start: int, stop: int) -> Any:
        found.append((key, start, stop))
        return read(key, start, stop)

    files.read = watched
    try:
        yield found
    finally:
        del files.read


@pytest.mark.parametrize("labels", ["aligned", "transformers"])
@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_rows_are_those_of_the_documents(tokens, labels, tmp_path):
    documents = numbered(ODD)
    packing = Packing(tokens, labels=labels)
    files = TokenDataset(**write(tmp_path, documents), packing=packing, shuffle=True, seed=5)
    packed = PackedDataset(documents, packing, shuffle=True, seed=5)
    for number in range(2):
        device = Device(2, number)
        expected = list(packed.placed(device))
        assert equal(list(files.placed(device)), expected)
        parts = [list(files.placed(device, lambda rank=rank: share(rank, 3))) for rank in range(3)]
        assert equal(whole_rows(parts), expected)


@pytest.mark.parametrize(
    ("cp", "layout", "devices", "workers"),
    rotated([1, 2, 3, 4], [(x, dp, w) for x in LAYOUTS for dp, w in ((1, 2), (2, 0))]),
)
def test_an_epoch_of_a_real_corpus(cp, layout, devices, workers, large):
    """Every token and every target once, of documents that may be cut into several rows."""
    data = TokenDataset(**large, packing=1 << 16, shuffle=True)
    rows = []
    for device in range(devices):
        parts = [
            loaded(
                data.placed(Device(devices, device), lambda rank=rank: share(rank, cp, layout)),
                workers,
            )
            for rank in range(cp)
        ]
        rows += whole_rows(parts)
    check_epoch(rows, LENGTHS)


def test_bytes_of_a_real_corpus(tmp_path):
    """Found by the token that ends a document; the rest of the file is one as well."""
    texts = [text.replace(b"\0", b"") + b"\0" for text in corpus()]
    file = tmp_path / "tokens.bin"
    file.write_bytes(b"".join(texts) + b"rest")
    data = TokenDataset(file, 1 << 16, dtype="uint8", end=0)
    rows = list(data)
    found = [torch.cat([row[name].flatten() for row in rows]) for name in ("input_ids", "labels")]
    whole = [torch.frombuffer(bytearray(x), dtype=torch.uint8).long() for x in (*texts, b"rest")]
    targets = [torch.cat([x[1:], torch.tensor([-100])]) for x in whole]
    assert torch.equal(pair_counts(*found), pair_counts(torch.cat(whole), torch.cat(targets)))


def test_ten_million_tokens_are_in_no_process(tmp_path):
    """One row of three documents on 64 ranks: reads and memory are those of one share."""
    size, cp = 10_000_000, 64
    torch.zeros(size, dtype=torch.uint16).numpy().tofile(tmp_path / "tokens.bin")
    torch.tensor([0, 3_000_001, 3_000_002, size]).numpy().tofile(tmp_path / "tokens.idx")
    data = TokenDataset(tmp_path / "tokens.bin", size, index=tmp_path / "tokens.idx")
    data._files.read(0, 0, 1)  # what is mapped is no memory of this process
    for rank in (0, 5, 63):
        own = data.placed(Device(1, 0), lambda rank=rank: share(rank, cp))
        with reads(own) as found, MemoryTracker() as memory:
            (part,) = own
        memory.close()
        held = part.part.sequence.layout.size(rank)
        assert held <= 1.06 * size / cp
        count = sum(stop - start for _, start, stop in found)
        assert held <= count <= held + 8, "one more for the target at the end of a span"
        assert all(x.shape == (1, held) for x in part.batch.values())
        assert memory.peak <= 8 * 8 * held, "a few columns of int64"


def test_peers_agree_without_reading_each_others_tokens(tmp_path):
    data = TokenDataset(**write(tmp_path, numbered(ODD)), packing=64)
    first, second = (
        list(data.placed(Device(1, 0), lambda rank=rank: share(rank, 2))) for rank in range(2)
    )
    assert all(isinstance(part, ShardedBatch) for part in first)
    assert [part.code for part in first] == [part.code for part in second]
    assert len({part.code for part in first}) == len(first) > 1
    assert first[0].shapes.startswith("input_ids (1, ")
    part = first[0].part
    assert part.fields["sequence"].length == part.sequence.length == part.sequence.documents[-1]


def test_other_processes_map_the_files_themselves(tmp_path):
    """And have the answer of the moment of the copy on how to cut."""
    data = TokenDataset(**write(tmp_path, numbered([100_000] * 3)), packing=1 << 17)
    own = data.placed(Device(1, 0), lambda: share(1, 2))
    expected = [part.batch for part in own]
    assert equal([part.batch for part in loaded(own, 1)], expected)
    copied = pickle.dumps(own)
    assert len(copied) < 5000
    assert equal([part.batch for part in pickle.loads(copied)], expected)


def test_documents_mean_what_was_declared(tmp_path):
    """As for rows that are cut whole: nothing is guessed."""
    data = TokenDataset(**write(tmp_path, numbered([3, 4])), packing=16)

    def part(**rules: Any) -> Any:
        how = share(0, 2)
        how = how._replace(rules=replace(how.rules, **rules))
        (found,) = data.placed(Device(1, 0), lambda: how)
        return found

    assert part().part.sequence.documents == (0, 3, 7)
    assert part(documents="none").part.sequence.documents is None
    transformers = part(documents="auto", as_transformers=True).part.sequence
    assert (transformers.documents, transformers.as_transformers) == ((0, 3, 7), True)
    wrong = part(documents="auto")
    assert isinstance(wrong, Uncut)
    assert "position_ids start anew within a row" in wrong.reason


def test_several_files_follow_each_other(tmp_path):
    for number, text in enumerate((b"abcd", b"", b"efghij")):
        (tmp_path / str(number)).write_bytes(text)
    files = [tmp_path / str(number) for number in range(3)]
    (row,) = TokenDataset(files, 16, dtype="uint8")
    assert bytes(row["input_ids"][0].tolist()) == b"abcdefghij"
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    found = TokenFiles(files, dtype="uint8", end=ord("f"))
    documents = [found.read(key, 0, length) for key, length in found.lengths(iter(range(3)))]
    assert [bytes(x.tolist()) for x in documents] == [b"abcd", b"ef", b"ghij"]
    assert len(found) == 3, "empty documents are none"


def test_files_that_do_not_fit_are_refused(tmp_path):
    file, index = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"12345")
    index.write_bytes(torch.tensor([0, 3, 6]).numpy().tobytes())
    with pytest.raises(ConfigError, match="there is no file"):
        TokenDataset(tmp_path / "c", 8)
    with pytest.raises(ConfigError, match=r"5 bytes, no multiple of the 2 of a torch\.uint16"):
        TokenDataset(file, 8)
    with pytest.raises(ConfigError, match="rise from 0 to 5"):
        TokenDataset(file, 8, dtype="uint8", index=index)
    with pytest.raises(ConfigError, match="1 index files for 1 token files, and end=0"):
        TokenDataset(file, 8, dtype="uint8", index=index, end=0)
    with pytest.raises(ConfigError, match="dtype='float32' is unknown"):
        TokenDataset(file, 8, dtype="float32")
