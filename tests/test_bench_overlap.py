"""`bench overlap`: its figures, its options, and one small run."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_cp.cli.bench.overlap.results import RankResult, row_of
from lightning_cp.cli.bench.overlap.settings import ARMS
from lightning_cp.cli.main import main
from lightning_cp.comm import throttle
from lightning_cp.comm.p2p import GroupLink
from lightning_cp.comm.throttle import ThrottledGather, ThrottledLink
from tests._harness.pool import Pool

GATHERED = dist.distributed_c10d.Work


def test_figures_by_hand() -> None:
    ranks = [
        RankResult(
            rate=1.0, chosen="early", seconds=dict.fromkeys(ARMS, own), again=again, spans={}
        )
        for own, again in (([4.0, 2.0, 6.0], [1.0, 4.0, 3.0]), ([3.0, 3.0, 1.0], [2.0, 1.0, 4.0]))
    ]
    ranks[0].seconds["early"] = [2.0, 1.0, 4.0]
    ranks[1].seconds["early"] = [1.0, 2.0, 5.0]
    fsdp, early = row_of("fsdp", ranks), row_of("early", ranks)
    # The slowest ranks of fsdp take 4, 3, 6, again 2, 4, 4; those of early 2, 2, 5.
    assert (fsdp.seconds, early.seconds) == (4.0, 2.0)
    assert fsdp.speedup == pytest.approx(1.5)  # of 2, 0.75, 1.5
    assert early.speedup == pytest.approx(1.5)  # of 2, 1.5, 1.2
    assert early.speedup_spread == pytest.approx((1.35, 1.75))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "1"], "--world 1 is less than 2"),
        (["--seqlen", "3"], "--seqlen 3 is less than 4"),
        (["--layers", "1"], "--layers 1 is less than 2"),
        (["--repeats", "1"], "--repeats 1 is less than 2"),
        (["--width", "20"], "--width 20 is no multiple of --heads 8"),
        (["--network", "0"], "--network 0.0 is no rate"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(["bench", "overlap", *options, "--json", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert not file.exists()


def gathered(rank: int, world: int) -> tuple[list[float], list[float]]:
    """What a paced gather gives, and when it and messages beside it are due, of a still clock."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 50.0, sleep=slept.append)
    real, throttle.time = throttle.time, clock
    try:
        link = ThrottledLink(GroupLink(dist.group.WORLD), 8e-6)  # 1000 bytes a second
        gather, part = ThrottledGather(link), torch.full((100,), float(rank))
        found = gather.allocate((100 * world,), dtype=part.dtype, device=part.device)
        work = gather(found, part, dist.group.WORLD, async_op=True)
        assert isinstance(work, GATHERED)
        assert slept == []
        assert link.spans == [("parameters", 50.0, 50 + 0.4 * (world - 1))]
        assert link.leaves(100, "messages") == pytest.approx(50 + 0.4 * (world - 1) + 0.1)
        work.wait()
        assert gather(found, part, dist.group.WORLD) is None
        kinds = [span.kind for span in link.spans]
        assert kinds == ["parameters", "messages", "waiting", "parameters", "waiting"]
        return found[::100].tolist(), slept
    finally:
        throttle.time = real


@pytest.mark.dist
def test_gathers_share_the_link(pool: Pool) -> None:
    for found, slept in pool.run(gathered, world=3):
        assert found == [0.0, 1.0, 2.0]
        assert slept == pytest.approx([0.8, 0.8 + 0.1 + 0.8])


@pytest.mark.timeout(120)
def test_a_small_run(tmp_path, capsys):
    file = tmp_path / "found.json"
    sizes = {"seqlen": 64, "layers": 2, "width": 16, "heads": 2, "repeats": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    options += ["--network", "0.5", "--dtype", "fp32", "--json", str(file), "--out", str(tmp_path)]
    assert main(["bench", "overlap", *options]) == 0
    assert (tmp_path / "overlap.png").stat().st_size > 5000
    found = json.loads(file.read_text())
    assert [row["window"] for row in found["rows"]] == list(ARMS)
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["rate"] <= 0.5
    for rank in found["spans"]:
        for window, spans in rank.items():
            assert {kind for kind, _, _ in spans} == {"messages", "parameters", "waiting"}, window
            assert all(0 <= start <= stop for _, start, stop in spans)
    assert found["auto"] in ARMS
    assert f"auto ({found['auto']})" in capsys.readouterr().out
