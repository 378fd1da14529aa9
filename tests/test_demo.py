import itertools
import json
import subprocess

import pytest
import torch

import lightning_cp
from lightning_cp.cli import children
from lightning_cp.cli.demo import command
from lightning_cp.cli.demo.data import SEPARATOR, Windows, source_text
from lightning_cp.cli.demo.job import Job, RankResult
from lightning_cp.cli.demo.model import DemoGPT
from lightning_cp.cli.demo.report import Report
from lightning_cp.cli.main import FAILED, INTERRUPTED, main
from lightning_cp.errors import ConfigError

SEQLEN = 509  # a prime: shares differ


@pytest.mark.full  # the demo itself is a stage of .ci/run
@pytest.mark.dist
@pytest.mark.timeout(120)
def test_demo_shows_equal_losses_and_less_memory(tmp_path, capfd):
    folder = tmp_path / "new" / "folder"
    options = ["--devices", "2", "--max-steps", "4", "--seqlen", str(SEQLEN), "--out", str(folder)]
    assert main(["demo", *options]) == 0
    report = json.loads((folder / "report.json").read_text())
    assert len(report["loss_cp"]) == len(report["loss_single"]) == 4
    assert report["loss_single"][-1] < report["loss_single"][0] - 1
    assert report["max_rel_loss_diff"] <= 1e-5
    assert report["max_rel_loss_diff"] == max(
        abs(a - b) / b for a, b in zip(report["loss_cp"], report["loss_single"], strict=True)
    )
    tokens = report["tokens_per_rank"]
    assert len(tokens) == 2
    assert sum(tokens) == SEQLEN
    assert sum(report["work_per_rank"]) == SEQLEN * (SEQLEN + 1) // 2
    peaks = report["peak_activation_bytes"]
    assert len(peaks["cp"]) == 2
    assert 0 < max(peaks["cp"]) < peaks["single"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")

    printed = capfd.readouterr()
    text = printed.out + printed.err
    assert "rank 1" in text
    assert "one process" in text
    for noise in ("Warning", "warn", "deprecated", "Gloo", "GPU available", "Tip:", "GLOBAL_RANK"):
        assert noise not in text


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_demo_keeps_its_promise(tmp_path):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["loss_cp"]) == 40
    assert report["max_rel_loss_diff"] <= 1e-5
    peaks = report["peak_activation_bytes"]
    assert max(peaks["cp"]) <= 0.6 * peaks["single"]
    assert report["loss_single"][0] > 5.5
    assert sum(report["loss_single"][-5:]) / 5 < 3.3


def test_text_depends_on_the_seed_alone(tmp_path):
    for name, content in {"b.py": "bb", "a.py": "a", "c/d.py": "dddd", "e.txt": "-"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "site-packages" / "p").mkdir(parents=True)
    (tmp_path / "site-packages" / "p" / "f.py").write_text("not of the library")
    texts = {source_text(100, seed=seed, folder=tmp_path) for seed in range(20)}
    parts = (b"a", b"bb", b"dddd")
    orders = {b"".join(p + SEPARATOR for p in order) for order in itertools.permutations(parts)}
    assert texts <= orders
    assert len(texts) > 1
    whole = source_text(100, seed=3, folder=tmp_path)
    assert source_text(5, seed=3, folder=tmp_path) == whole[:5]


def test_text_without_sources(tmp_path):
    with pytest.raises(ConfigError, match="0 Python sources"):
        source_text(10, seed=0, folder=tmp_path)


def test_text_of_the_standard_library():
    text = source_text(50_000, seed=1)
    assert len(text) == 50_000
    assert text == source_text(50_000, seed=1)
    assert text != source_text(50_000, seed=2)


@pytest.mark.parametrize(
    ("size", "seqlen", "count"), [(11, 5, 2), (10, 5, 1), (6, 5, 1), (2, 1, 1)]
)
def test_windows_are_consecutive_and_shifted(size, seqlen, count):
    text = bytes(range(size))
    windows = Windows(text, seqlen)
    assert len(windows) == count
    for i in range(count):
        window = windows[i]
        assert window["input_ids"].tolist() == list(range(i * seqlen, (i + 1) * seqlen))
        assert window["labels"].tolist() == list(range(i * seqlen + 1, (i + 1) * seqlen + 1))
        assert window["position_ids"].tolist() == list(range(seqlen))
        assert {x.dtype for x in window.values()} == {torch.int64}
    with pytest.raises(IndexError):
        windows[count]


def test_windows_need_text():
    with pytest.raises(ConfigError, match="choose --seqlen 4 or less"):
        Windows(b"12345", 5)


def test_model_has_about_a_million_parameters():
    assert 0.9e6 < sum(p.numel() for p in DemoGPT().parameters()) < 1.1e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "0"], "--devices 0 is less than 1; choose 1 or more"),
        (["--devices", "-2"], "--devices -2 is less than 1"),
        (["--max-steps", "0"], "--max-steps 0 is less than 1"),
        (["--seqlen", "0"], "--seqlen 0 is less than 1"),
        (["--out", __file__], "choose a folder that can be written"),
        (["--seqlen", str(10**9)], "or less"),
    ],
)
def test_bad_values_are_one_line(options, message, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *options]) == FAILED
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["dmeo"], "invalid choice"),
        (["demo", "--devices", "two"], "invalid int value"),
        (["demo", "--steps", "1"], "unrecognized arguments"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line(arguments, message, capfd):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == FAILED
    printed = capfd.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert "--help" in printed.err


def test_version(capfd):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capfd.readouterr().out == f"lightning-cp {lightning_cp.__version__}\n"


def test_missing_matplotlib_is_said_before_training(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo", "--out", str(tmp_path / "new")]) == FAILED
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1
    assert "pip install 'lightning-cp[plot]'" in printed.err
    assert not (tmp_path / "new").exists()


def test_failed_run(tmp_path, capfd, monkeypatch):
    def fail(arguments, **_):
        return subprocess.CompletedProcess(arguments, 7)

    monkeypatch.setattr(command.subprocess, "run", fail)
    assert main(["demo", "--seqlen", "8", "--out", str(tmp_path)]) == FAILED
    assert "ended with exit code 7" in capfd.readouterr().err


def test_interrupted_run(tmp_path, monkeypatch):
    def interrupt(arguments, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.subprocess, "run", interrupt)
    assert main(["demo", "--seqlen", "8", "--out", str(tmp_path)]) == INTERRUPTED


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_both_runs_use_as_many_threads(cores, devices, monkeypatch):
    monkeypatch.setattr(children, "_cores", lambda: cores)
    each, single = children.threads_each(devices), children.single_threads(devices)
    assert single == min(cores, each * devices)
    assert each == 1 or each * devices <= cores


def test_runs_have_no_ranks_of_another_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    environment = children.child_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert not {"LOCAL_RANK", "WORLD_SIZE"} & environment.keys()


def test_job_and_result_survive_files(tmp_path):
    job = Job(
        strategy="auto", devices=1, max_steps=2, seqlen=3, seed=4, text="text", results="results"
    )
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job
    result = RankResult(losses=[0.1, 1 / 3], tokens=1, work=2, peak_bytes=3)
    result.save(tmp_path, 1)
    assert RankResult.load(tmp_path, 1) == result


def test_report_takes_the_worst():
    ranks = [
        RankResult(losses=[2.0, 1.0], tokens=4, work=10, peak_bytes=50),
        RankResult(losses=[2.0, 1.0], tokens=3, work=18, peak_bytes=60),
    ]
    report = Report(ranks, RankResult(losses=[2.5, 1.0], tokens=7, work=28, peak_bytes=100))
    assert report.as_dict()["max_rel_loss_diff"] == pytest.approx(0.2)
    assert report.peak_ratio == 0.6
    assert report.as_dict()["tokens_per_rank"] == [4, 3]
