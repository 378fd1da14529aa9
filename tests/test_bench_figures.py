"""The figures and reports of `lightning-cp bench attention`, on made-up numbers."""

from dataclasses import replace

import pytest

from lightning_cp.cli.bench.attention import figures
from lightning_cp.cli.bench.attention.figures import Spread
from lightning_cp.cli.bench.attention.report import Report
from lightning_cp.cli.bench.attention.results import CaseResult, Checks, RankResult
from lightning_cp.cli.bench.attention.settings import Case, Launch
from lightning_cp.mask import Mask
from tests._harness.benched import SETTINGS


def test_slowest_rank_run_by_run():
    assert figures.slowest([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]


def test_efficiency_is_the_median_of_pairs_on_the_slowest_ranks():
    ideal = [[2.0, 3.0, 8.0, 100.0], [1.0, 6.0, 4.0, 1.0]]  # slowest: 2, 6, 8; the last has no pair
    real = [[4.0, 6.0, 1.0], [3.0, 5.0, 10.0]]  # slowest: 4, 6, 10
    assert figures.efficiency(ideal, real) == 0.8  # of 0.5, 1.0, 0.8


def test_repeatability_compares_each_ideal_with_the_next():
    assert figures.repeatability([[2.0, 4.0, 1.0], [1.0, 2.0, 2.0]]) == 1.25  # of 0.5 and 2
    assert figures.repeatability([[3.0, 3.0]]) == 1


def test_spread_and_typical_time():
    assert figures.spread([0.9, 0.5, 0.8]) == Spread(0.8, 0.5, 0.9)
    launches = [[[1.0, 2.0, 9.0]], [[5.0, 5.0, 5.0]], [[3.0, 1.0, 1.0], [2.0, 2.0, 2.0]]]
    assert figures.typical(launches) == 2


def test_phases_of_the_busiest_rank():
    ranks = [{"kernel": 4.0, "merge": 1.0}, {"kernel": 3.0, "merge": 0.5, "background": 2.0}]
    assert figures.busiest(ranks) is ranks[1]
    assert figures.nonkernel_fraction(ranks[1]) == pytest.approx(2.5 / 3)
    assert figures.median_phases([*ranks, ranks[0]]) == {
        "kernel": 4.0,
        "merge": 1.0,
        "background": 0.0,
    }


def result(scale, *, checks=None):
    return CaseResult(
        ideal_cpu=[1.0 * scale, 1.0 * scale, 2.0 * scale],
        ideal_wall=[3.0, 3.0, 3.0],
        real_cpu=[2.0, 2.0],
        real_wall=[4.0, 6.0],
        phases={"kernel": 1.0, "merge": 0.25, "background": 0.25 * scale},
        checks=checks,
    )


def made_up(settings):
    """Two launches of two ranks, the second rank with less work."""
    checks = (
        Checks(errors={"out": 1.1, "dq": 1.5}, bytes_sent=100, memory=(10, 30)),
        Checks(errors={}, bytes_sent=50, memory=(20, 5)),
    )
    return [
        [
            RankResult(
                link_rate=None if settings.network is None else rate,
                cases=[
                    result(scale if rank == 0 else 0.5, checks=checks[rank] if first else None)
                    for _ in settings.cases
                ],
            )
            for rank, rate in enumerate((0.9, 0.8))
        ]
        for scale, first in ((1, True), (1.5, False))
    ]


def test_report_of_made_up_launches():
    settings = SETTINGS
    report = Report.of(settings, made_up(settings))
    assert [row.name for row in report.rows] == ["ring fp32", "direct fp32"]
    row = report.rows[0]
    assert row.efficiency == Spread(0.625, 0.5, 0.75)
    assert row.repeatability == Spread(0.75, 0.75, 0.75)  # of 1 and 0.5
    assert row.nonkernel_fraction == pytest.approx((0.5 + 0.625) / 2)
    assert row.phases == pytest.approx({"kernel": 1e3, "merge": 250, "background": 312.5})
    assert (row.error_ratio, row.bytes_moved, row.memory) == (1.5, 150, (20, 30))
    assert (row.ideal_ms, row.real_ms) == (1250, 2000)
    assert (row.ideal_wall_ms, row.real_wall_ms) == (3000, 5000)
    assert (report.clock, report.link_rate) == ("cpu", None)


def test_report_over_an_emulated_link_compares_wall_times():
    settings = replace(SETTINGS, network=1.0)
    report = Report.of(settings, made_up(settings))
    row = report.rows[0]
    assert row.efficiency == Spread(0.625, 0.625, 0.625)  # of 3/4 and 3/6
    assert (row.ideal_ms, row.real_ms) == (3000, 5000)
    assert (report.clock, report.link_rate) == ("wall", 0.8)


def test_files_between_processes(tmp_path):
    settings = replace(SETTINGS, documents=(56, 200), overlaps=(True, False))
    launch = Launch(settings, first=True)
    launch.save(tmp_path / "job.json")
    assert Launch.load(tmp_path / "job.json") == launch
    for found in made_up(settings)[0]:
        found.save(tmp_path, 1)
        assert RankResult.load(tmp_path, 1) == found


def test_mask_and_cases_of_settings():
    chosen = {"documents": (56, 200), "window": 7, "overlaps": (True, False)}
    settings = replace(SETTINGS, **chosen, dtypes=("fp32", "bf16"))
    assert settings.mask == Mask(256, 256, documents=(0, 56, 256), window=(7, 0))
    assert settings.mask.visible(60, 56)
    assert not settings.mask.visible(60, 55)
    assert not settings.mask.visible(100, 92)
    assert [case.dtype for case in settings.cases] == ["fp32"] * 4 + ["bf16"] * 4
    assert settings.cases[:2] == (Case("fp32", "ring", True), Case("fp32", "ring", False))
