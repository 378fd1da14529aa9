"""`bench balance`: its rows, the figures it must reach, and what it writes."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from lightning_cp.balance import Loads
from lightning_cp.cli.bench.balance import command
from lightning_cp.cli.bench.balance.measure import LAYOUTS, Draw, makespans, measure
from lightning_cp.cli.bench.balance.report import rows_of
from lightning_cp.cli.bench.balance.rows import SETTINGS, Setting, draws, row
from lightning_cp.cli.main import main

FIELDS = [
    "tokens", "ranks", "layout", "work_max_over_mean_avg", "work_max_over_mean_worst",
    "tokens_max_over_mean_avg", "tokens_max_over_mean_worst", "bytes_over_row",
    "bytes_over_per_document", "bytes_over_bound", "fragments_over_per_document", "makespan",
    "makespan_overlapped", "plan_ms", "plan_ms_worst",
]  # fmt: skip
MOST_BYTES = {
    (65536, 4): 0.45,
    (131072, 8): 0.45,
    (524288, 8): 0.25,
    (1048576, 32): 0.15,
}
"""Of those of zigzag within every document."""


def test_rows_are_whole_files_but_the_last() -> None:
    assert len(draws()) == 20
    assert len(set(draws())) == 20
    for setting in SETTINGS:
        for seed in range(20):
            found = row(seed, setting.tokens)
            assert sum(found) == setting.tokens
            assert found[:-1] == draws()[seed][: len(found) - 1]
            assert 0 < found[-1] <= draws()[seed][len(found) - 1]


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (SETTINGS[0], 20),
        (SETTINGS[1], 20),
        pytest.param(SETTINGS[2], 20, marks=pytest.mark.full),
        pytest.param(SETTINGS[3], 20, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_balanced_layout_of_real_lengths(setting: Setting, count: int) -> None:
    names = ("per_document_zigzag", "balanced", "balanced_exact")
    found = {name: [measure(seed, setting, name) for seed in range(count)] for name in names}
    for result in rows_of(setting, found)[1:]:
        assert result.work_max_over_mean_worst <= 1.031
        assert result.tokens_max_over_mean_worst <= 1.051
        assert result.bytes_over_per_document <= MOST_BYTES[setting]
        assert 1 <= result.bytes_over_bound <= 1.35
        assert result.fragments_over_per_document <= 0.35
        assert result.makespan <= 1.085
        assert result.makespan_overlapped <= 1.035


def test_zigzag_within_documents_is_the_measure() -> None:
    draw = measure(3, SETTINGS[0], "per_document_zigzag")
    assert draw.work == pytest.approx(1, abs=1e-3)
    assert draw.received == pytest.approx(3 / 4 * 3 * 65536, rel=1e-3)


def test_makespans_of_two_ranks() -> None:
    found = Loads((100, 300), (1, 1), (1000, 0), (0, 1000), (1, 1), (1.0, 1.0))
    mean = 200 + 16384
    assert makespans(found) == ((100 + 16384 + 702000) / mean, 702000 / mean)


def test_figures_of_two_draws() -> None:
    def made(work: float, received: int, bound: int) -> Draw:
        return Draw(
            work=work, tokens=1.0, received=received, fragments=received, bound=bound,
            alone=work, overlapped=1.0, plan_ms=work,
        )  # fmt: skip

    base, own = [made(1.0, 100, 10), made(1.0, 50, 0)], [made(1.5, 10, 10), made(1.1, 10, 0)]
    result = rows_of(Setting(100, 2), {"per_document_zigzag": base, "balanced": own})[1]
    assert result.work_max_over_mean_avg == pytest.approx(1.3)
    assert result.work_max_over_mean_worst == result.plan_ms_worst == 1.5
    assert result.bytes_over_row == pytest.approx(10 / 200)
    assert result.bytes_over_per_document == pytest.approx(fmean([0.1, 0.2]))
    assert result.bytes_over_bound == 2.0


def test_the_command_writes_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SETTINGS", SETTINGS[:2])
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "balance.json"
    options = ["--draws", "2", "--json", str(file), "--out", str(tmp_path / "out")]
    assert main(["bench", "balance", *options]) == 0
    found = json.loads(file.read_text())
    assert found["draws"] == 2
    assert [(r["tokens"], r["layout"]) for r in found["rows"]] == [
        (setting.tokens, name) for setting in SETTINGS[:2] for name in LAYOUTS
    ]
    assert all(list(r) == FIELDS for r in found["rows"])
    assert (tmp_path / "out" / "balance.png").stat().st_size > 10000
    assert "per_document_zigzag" in capsys.readouterr().out


@pytest.mark.parametrize("draws", ["0", "21"])
def test_rows_that_are_not_there_are_refused(
    draws: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "balance", "--draws", draws]) == 2
    assert f"--draws {draws} must lie between 1 and 20" in capsys.readouterr().err
