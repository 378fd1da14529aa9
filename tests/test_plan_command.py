"""`lightning-cp plan`: what it reads, prints, writes and refuses."""

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.balance import Balanced, CostModel, layout_of
from lightning_cp.cli.main import main
from lightning_cp.cli.plan.documents import Wanted, first_row, lengths_of
from lightning_cp.cli.plan.figures import NAMES
from lightning_cp.errors import ConfigError
from lightning_cp.mask import Mask, Visibility
from lightning_cp.plan import build_plan

LENGTHS = (900, 30, 1, 0, 400, 250)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "lengths.txt"
    found.write_text("900 30\n1, 0, 400\n250\n")
    return found


def plan(file: Path, *options: str) -> dict[str, Any]:
    out = file.with_name("plan.json")
    assert main(["plan", "--lengths", str(file), "--json", str(out), *options]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ((), Visibility()),
        (("--window", "63"), Visibility(window=(63, None))),
        (("--bidirectional",), Visibility(is_causal=False)),
        (("--chunk", "128"), Visibility(chunk=128)),
        (("--prefix", "1000"), Visibility(prefix=(1000,))),
    ],
    ids=["causal", "window", "bidirectional", "chunk", "prefix"],
)
def test_its_figures_are_those_of_the_plans(
    options: tuple[str, ...], seen: Visibility, file: Path
) -> None:
    found = plan(file, "--ranks", "3", "--kv-heads", "2", "--head-dim", "16", *options)
    assert (found["tokens"], found["documents"], found["ranks"]) == (1581, 6, 3)
    assert list(found["layouts"]) == list(NAMES)
    edges = (0, 900, 930, 931, 931, 1331, 1581)
    mask = Mask(1581, 1581, seen.is_causal, edges, None, seen.window, seen.chunk, seen.prefix)
    for name in ("contiguous", "zigzag", "per_document_zigzag"):
        layout = layout_of(name, LENGTHS, 3)
        for rank, row in enumerate(found["layouts"][name]):
            made = build_plan(layout, layout, mask, rank=rank, exchange="direct")
            traffic = made.traffic(kv_heads=2, head_dim=16, itemsize=2)
            assert row["bytes_received"] == traffic.forward_received
            assert row["pairs"] == made.work()
            assert row["tokens"] == made.q_size
    for rows in found["layouts"].values():
        assert sum(row["tokens"] for row in rows) == 1581
        assert sum(row["tokens_over_share"] for row in rows) == pytest.approx(3)
        assert sum(row["work_over_share"] for row in rows) == pytest.approx(3)
    assert (found["keys_received_bound"] is None) == bool(options)


def test_it_prints_a_table_and_draws(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = file.parent / "out"
    assert main(["plan", "--lengths", str(file), "--ranks", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1581 tokens in 6 documents on 2 ranks" in printed
    assert all(name in printed for name in NAMES)
    assert (out / "plan.png").stat().st_size > 10000


def test_one_layout_and_times_of_a_cost_model(file: Path) -> None:
    cost = file.with_name("cost.json")
    CostModel(pair=1.0, token=0.0, tile=0.0, bandwidth=2.0, key_bytes=1.0, latency=0.0).save(cost)
    found = plan(file, "--ranks", "2", "--layout", "balanced", "--cost", str(cost))
    assert list(found["layouts"]) == ["balanced"]
    for row in found["layouts"]["balanced"]:
        assert row["compute_ms"] == 1e3 * row["pairs"]
        assert row["link_ms"] == 1e3 * (row["keys_received"] + row["keys_served"]) / 4


@pytest.mark.parametrize("text", ["[900, 30, 1, 0, 400, 250]", "900,30,1,0,400,250"])
def test_lengths_in_other_clothes(text: str, tmp_path: Path) -> None:
    found = tmp_path / "lengths.json"
    found.write_text(text)
    assert lengths_of(found) == LENGTHS


@pytest.mark.parametrize("text", ["", "0 0", "12 x", "3.5", "-4", "[[1], 2]"])
def test_files_without_lengths_are_refused(text: str, tmp_path: Path) -> None:
    found = tmp_path / "lengths.txt"
    found.write_text(text)
    with pytest.raises(ConfigError, match="must hold numbers of tokens"):
        lengths_of(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "0"), "--ranks 0 must be at least 1"),
        (("--kv-heads", "0"), "--kv-heads 0 must be at least 1"),
        (("--heads", "9"), "--heads 9 is no multiple of --kv-heads 8"),
        (("--layers", "0"), "--layers 0 must be at least 1"),
        (("--window", "-1"), "--window -1 must be at least 0"),
        (("--chunk", "0"), "--chunk 0 must be at least 1"),
        (("--prefix", "-2"), "--prefix -2 must be at least 0"),
        (("--prefix", "2", "--bidirectional"), "--prefix 2 has no effect with --bidirectional"),
        (("--work-cap", "0.5"), "work_cap=0.5 must be a number of at least 1"),
        (("--cost", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: tuple[str, ...], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--lengths", str(file), *options]) == 2
    assert message in capsys.readouterr().err


MODEL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--layers", "3", "--hidden", "32")


def test_memory_of_the_ranks(file: Path) -> None:
    found = plan(file, "--ranks", "3", "--dtype", "fp32", *MODEL)
    # A layer keeps 12 x 32 elements of norms and MLP, twice 4 x 8 of queries, twice 2 x 8 of keys.
    token = 3 * 4 * (12 * 32 + 2 * 4 * 8 + 2 * 2 * 8)
    for name, rows in found["layouts"].items():
        layout = layout_of(Balanced() if name == "balanced" else name, LENGTHS, 3)
        mask = Mask.packed((0, *accumulate(LENGTHS)))
        for rank, row in enumerate(rows):
            made = build_plan(layout, layout, mask, rank=rank, exchange="direct")
            peaks = made.memory(heads=4, kv_heads=2, head_dim=8, itemsize=4)
            assert row["attention_bytes"] == max(peaks)
            assert row["activation_bytes"] == token * row["tokens"]


@pytest.mark.parametrize(
    ("text", "ranks", "pays"),
    [("4000 " * 8, "4", False), ("90000 700 300", "4", True), ("16 " * 64, "8", False)],
    ids=["equal", "one long", "short"],
)
def test_whether_cutting_pays(
    text: str, ranks: str, pays: bool, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    found = plan(file, "--ranks", ranks)["pays"]
    assert found["cutting"] == pays
    lengths = lengths_of(file)
    assert found["longest"] == max(lengths)
    assert found["whole_tokens"] == (max(lengths) if pays else sum(lengths) // int(ranks))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"Context parallelism {'pays' if pays else 'does not pay'}")


def test_whole_documents_are_dealt_out_by_time(file: Path) -> None:
    cost = file.with_name("cost.json")
    CostModel(pair=1.0, token=0.0, tile=0.0, latency=0.0).save(cost)
    found = plan(file, "--ranks", "2", "--cost", str(cost))["pays"]
    assert found["whole_seconds"] == 900 * 901 / 2  # all the others take less on the second rank
    assert found["whole_tokens"] == 900
    assert found["seconds"] == min(
        max(row["compute_ms"] for row in rows) / 1e3
        for rows in plan(file, "--ranks", "2", "--cost", str(cost))["layouts"].values()
    )


DOCUMENTS = [list(range(n)) for n in (5, 7, 2)]


def stream() -> Iterator[list[int]]:
    return iter(DOCUMENTS)


def test_rows_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(dataset: Path | str, tokens: int = 100, **options: Any) -> tuple[int, ...]:
        values = {"token_dtype": "uint16", "end": None, **options}
        return first_row(Wanted(str(dataset), tokens, **values))

    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, size in (("a.txt", 7), ("b/c.txt", 9), ("b/.hidden", 3), (".git/x", 4)):
        (folder / name).write_bytes(bytes(size))
    assert row(folder) == (7, 9)
    assert row(folder, 10) == (7, 3)
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes([1, 0, 0, 0, 2, 0, 3, 0]))
    assert row(tokens) == (4,)
    assert row(tokens, end=0) == (2, 2)
    assert row(tokens, token_dtype="uint8") == (8,)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_data.py").write_text(
        "from tests.test_plan_command import DOCUMENTS as found, stream\nempty = [[]]\n"
        "padded = [{'input_ids': [1, 2], 'attention_mask': [1, 0]}]\n"
    )
    assert row("own_data:found") == (5, 7, 2)
    assert row("own_data:stream", 6) == (5, 1)
    for dataset, message in (
        ("own_data:nothing", "cannot be had"),
        ("no_such_module:x", "cannot be had"),
        ("own_data:empty", "has no tokens"),
        ("own_data:padded", "gives no documents"),
        ("nowhere.bin", "there is no file nowhere.bin"),
    ):
        with pytest.raises(ConfigError, match=message):
            row(dataset)


def test_lengths_or_a_dataset_are_asked_for(file: Path) -> None:
    for options in ((), ("--lengths", str(file), "--dataset", str(file.parent))):
        with pytest.raises(SystemExit):
            main(["plan", *options])
    out = file.with_name("plan.json")
    asked = ("--dataset", str(file.parent), "--tokens", "9", "--ranks", "2", "--json", str(out))
    assert main(["plan", *asked]) == 0
    assert json.loads(out.read_text())["tokens"] == 9


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--lengths", "nowhere.txt"]) == 2
    assert "nowhere.txt cannot be read" in capsys.readouterr().err
