"""`bench packed`: the clock of each rank, its results, totals, merged files, the command."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_cp.balance import layout_of
from lightning_cp.cli.bench.attention.measure import Attention, Inputs
from lightning_cp.cli.bench.balance.rows import row
from lightning_cp.cli.bench.packed import command, peer
from lightning_cp.cli.bench.packed.measure import GroupCall, measure, one_thread, received, row_of
from lightning_cp.cli.bench.packed.peer import PEER, peer_bytes, peer_lengths, positions
from lightning_cp.cli.bench.packed.results import Results, Row, merged, repeated
from lightning_cp.cli.bench.packed.settings import DEFAULT_LAYOUTS, Settings, Sizes
from lightning_cp.cli.bench.packed.step import Steps, batch_of
from lightning_cp.cli.bench.packed.worker import Seconds, result_of, run
from lightning_cp.cli.main import main
from lightning_cp.mask import Mask
from lightning_cp.plan import build_plan
from tests._harness import oracle
from tests._harness.ticking import Ticking

SIZES = Sizes(tokens=300, ranks=3, heads=2, head_dim=8, dtype="fp64", exchange="direct")
SMALL = ["--tokens", "400", "--ranks", "2", "--heads", "1", "--head-dim", "8", "--draws", "2"]


@pytest.mark.parametrize("exchange", ["direct", "ring"])
@pytest.mark.parametrize("name", [*DEFAULT_LAYOUTS, "contiguous"])
def test_every_rank_has_its_own_clock_and_right_results(name, exchange):
    lengths, world = (1, 137, 53, 2), 4
    length = sum(lengths)
    layout = layout_of(name, lengths, world)
    mask = Mask(length, length, documents=(0, *accumulate(lengths)))
    plans = [build_plan(layout, layout, mask, rank=r, exchange=exchange) for r in range(world)]
    generator = torch.Generator().manual_seed(5)
    whole = [
        torch.randn(1, 2, length, 8, generator=generator, dtype=torch.float64) for _ in range(4)
    ]
    inputs = [Inputs(*(layout.shard(x, rank=r, dim=2) for x in whole)) for r in range(world)]
    kernel = Ticking(pair=1)
    found, seconds = GroupCall(plans, kernel, inputs, clock=kernel.clock)()
    assert seconds == [2 * 2 * plan.work() for plan in plans]
    truth = oracle.attention(*whole, mask, scale=8**-0.5)
    for field in Attention._fields:
        got = layout.unshard([getattr(own, field) for own in found], dim=2)
        torch.testing.assert_close(got, getattr(truth, field), atol=1e-12, rtol=0)


def test_a_row_of_each_layout_in_turns():
    ticks = iter(range(10**6))
    layouts = ("balanced", "zigzag", "contiguous")
    settings = Settings(sizes=SIZES, layouts=layouts, seeds=range(4, 5), repeats=2)
    found = measure(settings, 4, warm_up=True, clock=lambda: float(next(ticks)))
    assert [r.layout for r in found] == list(layouts)
    assert all(len(r.seconds) == 3 and {len(runs) for runs in r.seconds} == {2} for r in found)
    lengths = row(4, 300)
    mask = Mask(300, 300, documents=(0, *accumulate(lengths)))
    for own in found:
        layout = layout_of(own.layout, lengths, 3)
        plans = [build_plan(layout, layout, mask, rank=r, exchange="direct") for r in range(3)]
        work = [plan.work() for plan in plans]
        assert own.work_max_over_mean == pytest.approx(3 * max(work) / sum(work))
        assert own.tokens_max_over_mean == pytest.approx(max(layout.sizes) / 100)
        assert own.bytes_received == max(received(plan, SIZES) for plan in plans)
    assert found[1].work_max_over_mean == found[0].zigzag_work_max_over_mean
    # The clock ticks twice when a rank is resumed, in the run that is dropped as in the others.
    resumed = [sum(map(sum, own.seconds)) for own in found]
    assert next(ticks) == 2 * (sum(resumed) + resumed[0] / settings.repeats)


def test_bytes_that_a_rank_receives():
    lengths = (300,)
    layout = layout_of("contiguous", lengths, 3)
    plan = build_plan(layout, layout, Mask(300, 300), rank=2, exchange="direct")
    # Keys and values of 200 tokens, twice, each 2 heads of 8 numbers of 8 bytes.
    assert received(plan, SIZES) == 2 * 200 * 2 * 2 * 8 * 8


def test_one_thread_only_inside():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def made(draw: int, layout: str, runs: list[float], *, uneven: float, size: int) -> Row:
    return Row(
        command=0, draw=draw, layout=layout, work_max_over_mean=1.0, tokens_max_over_mean=1.0,
        zigzag_work_max_over_mean=uneven, bytes_received=size,
        seconds=[runs, [x / 2 for x in runs]],
    )  # fmt: skip


ROWS = [
    made(0, "a", [1.0, 2.0, 3.0], uneven=1.2, size=10**9),
    made(0, "b", [4.0, 5.0, 4.0], uneven=1.2, size=2 * 10**9),
    made(1, "a", [3.0, 2.0, 1.0], uneven=1.6, size=0),
    made(1, "b", [8.0, 9.0, 7.0], uneven=1.6, size=10**9),
]
RESULTS = Results(sizes=SIZES, network=8.0, rows=ROWS)


def test_totals_are_sums_of_the_slowest_ranks_medians():
    base, other = RESULTS.totals()
    assert (base.layout, base.draws, base.seconds, base.ratio, base.ratio_with_link) == (
        "a", 2, 4.0, 1.0, 1.0,
    )  # fmt: skip
    assert (other.layout, other.draws, other.seconds, other.first_seconds) == ("b", 2, 12.0, 4.0)
    assert (other.link_seconds, other.first_link_seconds) == (3.0, 1.0)
    assert other.ratio == 3.0
    assert other.ratio_with_link == 15.0 / 5.0
    assert other.aa == (1.0, 1.0)  # 4, 4, 4
    assert replace(RESULTS, network=None).totals()[1].ratio_with_link == other.ratio


def test_totals_of_uneven_draws():
    base, other = RESULTS.totals(1.5)
    assert (base.draws, other.draws, other.ratio) == (1, 1, 4.0)
    assert other.aa == (1.5, 2.0)
    assert RESULTS.totals(2.0) == []


def test_runs_that_all_have_tell_the_noise():
    assert repeated([ROWS[0], made(2, "a", [1.0, 4.0], uneven=1, size=0)]) == (2 / 6, 2 / 6)


def test_merged_commands_are_compared_each_within_itself(tmp_path):
    files = [tmp_path / f"{n}.json" for n in range(3)]
    RESULTS.save(files[0])
    other = [
        made(0, "c", [5.0, 5.0], uneven=1.2, size=0),
        made(0, "a", [2.0, 4.0], uneven=1.2, size=0),
    ]
    replace(RESULTS, rows=other).save(files[1])
    found = merged(files[:2], 8.0)
    assert [r.command for r in found.rows] == [0, 0, 0, 0, 1, 1]
    totals = {total.layout: total for total in found.totals()}
    assert (totals["a"].draws, totals["a"].seconds) == (3, 7.0)
    assert (totals["b"].draws, totals["b"].ratio) == (2, 3.0)
    assert (totals["c"].draws, totals["c"].ratio) == (1, 5 / 3)
    found.save(files[2])
    assert merged(files[2:], 8.0) == found


def test_files_that_cannot_be_merged_are_refused(tmp_path, capsys):
    good, other, bad = (tmp_path / f"{name}.json" for name in ("good", "other", "bad"))
    RESULTS.save(good)
    replace(RESULTS, sizes=replace(SIZES, tokens=299)).save(other)
    bad.write_text('{"rows": []}')
    for files, message in (
        ([good, other], "different sizes cannot be added up"),
        ([good, bad], "bad.json is no file that `bench packed --json` wrote"),
        ([tmp_path / "none.json"], "none.json is no file"),
    ):
        assert main(["bench", "packed", "--merge", *map(str, files)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks 0 is less than 1"),
        (["--tokens", "10000000"], "--tokens 10000000 is more than the 10"),
        (["--first", "19", "--draws", "2"], "there are the rows 0..19"),
        (["--draws", "0"], "there are the rows 0..19"),
        (["--first", "-1"], "there are the rows 0..19"),
        (["--repeats", "1"], "--repeats 1 is less than 2"),
        (["--layout", "zigzag", "--layout", "zigzag"], "each can be given once"),
        (["--network", "0"], "--network 0.0 is no rate"),
        (["--layers", "0"], "--layers 0 is less than 1"),
        (["--peer", PEER], "--peer ring-flash-attn sends messages of its own"),
        (["--peer", PEER, "--mode", "processes", "--dtype", "fp32"], "half precision only"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message, capsys):
    assert main(["bench", "packed", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(peer, "PACKAGES", ("no_such_package",))
    assert main(["bench", "packed", "--peer", PEER, "--mode", "processes"]) == 2
    assert "no_such_package cannot be imported; pip install" in capsys.readouterr().err


def test_what_the_peer_is_given_and_what_it_receives():
    assert peer_lengths((1, 0, 16, 137), 4) == (8, 16, 144)
    held = [positions((8, 16), rank, 2).tolist() for rank in range(2)]
    assert held[0] == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert sorted(held[0] + held[1]) == list(range(24))
    # A shard of 6 tokens: keys and values go on 3 times, twice; gradients 4 times, in 4 bytes.
    assert peer_bytes((8, 16), 4, row=10, itemsize=2) == 6 * 10 * (2 * 3 * 2 + 4 * 4)
    sizes = replace(SIZES, dtype="bf16", mode="processes")
    taken = peer_lengths(row(4, 300), 3)
    found = row_of(sizes, 4, PEER, [[1.0], [2.0], [3.0]])
    assert found.bytes_received == peer_bytes(taken, 3, row=2 * 2 * 8, itemsize=2)
    assert (
        found.work_max_over_mean == row_of(sizes, 4, "per_document_zigzag", []).work_max_over_mean
    )


def test_the_stand_in_for_flash_attn_is_right(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "_harness" / "peers"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    package = import_module("flash_attn.flash_attn_interface")
    generator = torch.Generator().manual_seed(2)
    for causal, q_lengths, k_lengths in ((True, (5, 0, 3), (5, 0, 3)), (False, (2, 4), (6, 1))):
        q, k, v, grad = (
            torch.randn(sum(n), 2, 8, generator=generator, dtype=torch.float64)
            for n in (q_lengths, k_lengths, k_lengths, q_lengths)
        )
        edges = [torch.tensor([0, *accumulate(n)]) for n in (q_lengths, k_lengths)]
        most = max(q_lengths), max(k_lengths)
        given = (*edges, *most, 0.0, 0.3, causal)
        out, lse, _, _ = package._flash_attn_varlen_forward(q, k, v, *given)
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        package._flash_attn_varlen_backward(grad, q, k, v, out, lse, *grads, *given)
        document = [
            torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in (q_lengths, k_lengths)
        ]
        seen = document[0][:, None] == document[1]
        if causal:
            seen &= torch.ones_like(seen).tril()
        whole = [x.transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        truth = F.scaled_dot_product_attention(*whole, attn_mask=seen, scale=0.3)
        wanted = torch.autograd.grad(truth, whole, grad.transpose(0, 1)[None])
        for x, y in zip((out, *grads), (truth, *wanted), strict=True):
            torch.testing.assert_close(x, y[0].transpose(0, 1), atol=1e-12, rtol=0)
    sys.modules.pop("flash_attn.flash_attn_interface")
    sys.modules.pop("flash_attn")


def test_settings_reach_another_process():
    sizes = replace(SIZES, mode="step", layers=3)
    settings = Settings(sizes=sizes, layouts=("zigzag",), seeds=range(2, 5), repeats=2)
    assert Settings.from_json(json.loads(json.dumps(settings.as_json()))) == settings


def test_files_of_before_modes_are_read(tmp_path):
    file = tmp_path / "old.json"
    RESULTS.save(file)
    found = json.loads(file.read_text())
    del found["sizes"]["mode"], found["sizes"]["layers"]
    file.write_text(json.dumps(found))
    assert merged([file], 8.0).sizes == SIZES


def measured_by(rank: int, world: int, settings: Settings) -> list[Seconds]:
    return run(settings, rank)


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["processes", "step"])
def test_real_ranks_measure_every_arm_of_every_draw(mode, pool):
    sizes = replace(SIZES, ranks=2, mode=mode, layers=1)
    settings = Settings(sizes=sizes, layouts=("balanced", "zigzag"), seeds=range(2), repeats=2)
    for draws in pool.run(measured_by, settings, world=2):
        assert [list(seconds) for seconds in draws] == [["balanced", "zigzag"]] * 2
        assert all(len(runs) == 2 and min(runs) > 0 for each in draws for runs in each.values())


def losses(rank: int, world: int, layouts: list[str]) -> list[float]:
    sizes = replace(SIZES, ranks=world, mode="step", layers=2)
    steps = Steps(sizes, rank=rank, group=dist.group.WORLD)
    found = [
        steps(layout, batch_of((137, 1, 52), seed)).item() for seed, layout in enumerate(layouts)
    ]
    steps.close()
    return found


@pytest.mark.dist
def test_steps_are_the_same_under_every_layout_and_number_of_ranks(pool):
    layouts = ["zigzag", "balanced", "per_document_zigzag"]
    (truth,) = pool.run(losses, ["zigzag"] * 3, world=1)
    for world in (2, 3):
        for found in pool.run(losses, layouts, world=world):
            assert found == pytest.approx(truth, abs=1e-12)


def test_the_command_starts_processes(monkeypatch, tmp_path):
    def fake(module: str, job: Path, ranks: int, *, threads: int) -> list[int]:
        settings = Settings.from_json(json.loads(job.read_text()))
        for rank in range(ranks):
            draw = {name: [1.0 + rank, 2.0 + rank] for name in settings.layouts}
            result_of(job.parent, rank).write_text(json.dumps([draw] * len(settings.seeds)))
        return [codes.get(rank, 0) for rank in range(ranks)]

    codes: dict[int, int] = {}
    monkeypatch.setattr(command, "run_ranks", fake)
    file = tmp_path / "packed.json"
    options = ["bench", "packed", *SMALL, "--repeats", "2", "--mode", "step", "--json", str(file)]
    assert main(options) == 0
    found = json.loads(file.read_text())
    assert [r["slowest"] for r in found["rows"]] == [2.5] * 6
    assert found["sizes"]["mode"] == "step"
    codes[1] = 2
    assert main(options) != 0


def test_the_command_measures_merges_and_writes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    file, both = tmp_path / "packed.json", tmp_path / "both.json"
    assert main(["bench", "packed", *SMALL, "--repeats", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [(r["draw"], r["layout"]) for r in found["rows"]] == [
        (draw, name) for draw in range(2) for name in DEFAULT_LAYOUTS
    ]
    assert all(
        len(r["seconds"]) == 2 and r["slowest"] > 0 and len(r["aa_spread"]) == 2
        for r in found["rows"]
    )
    assert [total["layout"] for total in found["totals"]] == list(DEFAULT_LAYOUTS)
    assert found["totals"][0]["ratio_with_link"] is None
    printed = capsys.readouterr().out
    assert "per_document_zigzag" in printed
    assert "with link" not in printed
    options = ["--merge", str(file), str(file), "--network", "1", "--json", str(both)]
    assert main(["bench", "packed", *options, "--out", str(tmp_path)]) == 0
    assert [total["draws"] for total in json.loads(both.read_text())["totals"]] == [4, 4, 4]
    assert (tmp_path / "packed.png").stat().st_size > 10000
    assert "with link" in capsys.readouterr().out
