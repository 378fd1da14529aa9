"""`lightning-cp bench attention`: its arguments, and whole runs of it."""

import json

import pytest

from lightning_cp.cli.bench.attention.settings import Launch
from lightning_cp.cli.main import FAILED, main

SMALL = ["--seqlen", "256", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--launches", "1"]
EVERY = ["allgather", "direct", "hybrid", "ring", "ulysses"]
KEYS = {
    "exchange",
    "layout",
    "world",
    "dtype",
    "seqlen",
    "overlap",
    "network",
    "efficiency",
    "efficiency_spread",
    "aa_spread",
    "nonkernel_fraction",
    "phases",
    "error_ratio",
    "bytes_moved",
    "bytes_planned",
    "memory_forward",
    "memory_backward",
    "ideal_ms",
    "real_ms",
    "ideal_wall_ms",
    "real_wall_ms",
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "0"], "--world 0 is less than 1; choose 1 or more"),
        (["--seqlen", "-1"], "--seqlen -1 is less than 1"),
        (["--repeats", "0"], "--repeats 0 is less than 1"),
        (["--heads", "8", "--kv-heads", "3"], "--kv-heads 3 does not divide --heads 8"),
        (
            ["--world", "4", "--heads", "2", "--exchange", "ulysses"],
            "--exchange ulysses with --heads 2: 4 ranks swap heads for tokens",
        ),
        (["--kv-heads", "0"], "--kv-heads 0 is less than 1"),
        (["--documents", "100,200"], "--documents 100,200 are 300 tokens, --seqlen is 8192"),
        (["--documents", "8192,0"], "a document has 1 token or more"),
        (["--documents", "8000,x"], "write numbers with commas between them"),
        (["--window", "-1"], "--window -1 is less than 0"),
        (["--network", "0"], "--network 0.0 is no rate; choose Gbit/s above 0"),
        (["--network", "nan"], "--network nan is no rate"),
        (["--network", "1", "--world", "1"], "nothing travels; choose 2 or more"),
        (["--json", "/no/such/folder/x.json"], "choose a file in a folder that exists"),
        (["--json", "."], "is a folder; choose the name of a file"),
        (["--out", __file__], "choose a folder that can be written"),
    ],
)
def test_bad_values_are_one_line(options, message, capfd, monkeypatch):
    monkeypatch.setattr("lightning_cp.cli.bench.attention.command.run_ranks", None)
    assert main(["bench", "attention", *options]) == FAILED
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--exchange", "pigeon"], "invalid choice: 'pigeon'"),
        (["attention", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["attention", "--world", "two"], "invalid int value: 'two'"),
        (["everything"], "invalid choice: 'everything'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_arguments_that_cannot_be_parsed(arguments, message, capfd):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == FAILED
    printed = capfd.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_picture_needs_matplotlib(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "attention", "--out", str(tmp_path)]) == FAILED
    assert "pip install 'lightning-cp[plot]'" in capfd.readouterr().err


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_command(tmp_path, capfd):
    file, folder = tmp_path / "bench.json", tmp_path / "new"
    options = [*SMALL, "--dtype", "fp32", "--json", str(file), "--out", str(folder)]
    assert main(["bench", "attention", *options]) == 0
    found = json.loads(file.read_text())
    assert [row["exchange"] for row in found["rows"]] == EVERY
    for row in found["rows"]:
        assert set(row) == KEYS
        assert (row["world"], row["dtype"], row["seqlen"]) == (2, "fp32", 256)
        assert (row["overlap"], row["network"]) == (True, None)
        assert row["bytes_moved"] == row["bytes_planned"] > 0
        assert 0 < row["error_ratio"] <= 2
        low, high = row["efficiency_spread"]
        assert 0 < low <= row["efficiency"] <= high
        assert 0 < row["aa_spread"][0] <= row["aa_spread"][1]
        assert row["phases"]["kernel"] > 0
        assert row["nonkernel_fraction"] > 0
        # The output in the forward, the gradients in the backward, and buffers beside them.
        shard = 128 * 2 * 16 * 4
        assert row["memory_forward"] > shard
        assert row["memory_backward"] > 3 * shard
        assert row["ideal_ms"] > 0
        assert row["real_ms"] > 0
    assert (found["seqlen"], found["repeats"], found["layout"]) == (256, 1, "zigzag")
    assert (found["clock"], found["link_rate"]) == ("cpu", None)
    assert (folder / "attention.png").read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr()
    assert "ring fp32" in printed.out
    assert "arning" not in printed.out + printed.err


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_command_over_a_slow_link(tmp_path):
    file = tmp_path / "bench.json"
    special = ["--network", "0.05", "--documents", "56,200", "--window", "90", "--no-overlap"]
    chosen = ["--dtype", "bf16", "--exchange", "direct", "--kv-heads", "1"]
    assert main(["bench", "attention", *SMALL, *special, *chosen, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row["overlap"] for row in found["rows"]] == [True, False]
    assert 0.03 < found["link_rate"] <= 0.05
    for row in found["rows"]:
        assert row["bytes_moved"] == row["bytes_planned"] > 0
        assert 0 < row["error_ratio"] <= 2
        # One of the two ranks sends half or more, and cannot be faster than its link.
        assert row["real_ms"] > row["bytes_moved"] / 2 / (0.05e9 / 8) * 1e3
        assert (row["ideal_ms"], row["real_ms"]) == (row["ideal_wall_ms"], row["real_wall_ms"])


def test_a_failed_process_is_an_error(capfd, monkeypatch):
    started = []

    def run_ranks(module, job, ranks, *, threads):
        started.append((module, Launch.load(job), ranks, threads))
        return [0, 2]

    monkeypatch.setattr("lightning_cp.cli.bench.attention.command.run_ranks", run_ranks)
    assert main(["bench", "attention", *SMALL]) == FAILED
    assert "the processes ended with exit codes [0, 2]" in capfd.readouterr().err
    (module, launch, ranks, threads) = started[0]
    assert (module, ranks, threads) == ("lightning_cp.cli.bench.attention.worker", 2, 1)
    assert launch.first
    assert launch.settings.kv_heads == launch.settings.heads == 2
    assert launch.settings.dtypes == ("fp32", "bf16")
    assert launch.settings.exchanges == tuple(EVERY)
