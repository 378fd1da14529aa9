"""`lightning-cp bench attention`: its figures on made-up numbers, its instruments, the command."""

import json
import time

import pytest
import torch

from lightning_cp.cli.bench.attention import figures
from lightning_cp.cli.bench.attention.figures import Spread
from lightning_cp.cli.bench.attention.measure import (
    Attention,
    CountingLink,
    DistributedCall,
    Inputs,
    KernelCalls,
    PhaseTimes,
    phases,
    timed,
)
from lightning_cp.cli.bench.attention.report import Report
from lightning_cp.cli.bench.attention.results import CaseResult, Checks, RankResult
from lightning_cp.cli.bench.attention.settings import Case, Launch, Settings
from lightning_cp.cli.bench.attention.truth import Truth
from lightning_cp.cli.main import FAILED, main
from lightning_cp.comm.mailbox import Mailboxes
from lightning_cp.exchange import executor
from lightning_cp.kernels import KERNELS
from lightning_cp.mask import Mask
from tests._harness import oracle

OPTIONS = {
    "world": 2,
    "seqlen": 256,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "dtypes": ("fp32",),
    "layout": "zigzag",
    "exchanges": ("ring", "direct"),
    "documents": None,
    "window": None,
    "network": None,
    "repeats": 2,
    "launches": 2,
    "overlaps": (True,),
}
SMALL = ["--seqlen", "256", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--launches", "1"]
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


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_phase_probe_adds_up_cpu_time():
    probe = PhaseTimes()
    for _ in range(2):
        with probe("kernel"):
            burn(0.01)
    with probe("communication"):
        time.sleep(0.05)
    assert 0.02 <= probe.seconds["kernel"] < 0.03
    assert probe.seconds["communication"] < 0.01, "waiting costs no CPU time"


def test_phases_add_up_to_the_process():
    def call(probe):
        with probe("merge"):
            burn(0.01)
        burn(0.02)

    barriers = []
    start = time.process_time()
    found = phases(call, runs=2, barrier=lambda: barriers.append(1))
    whole = time.process_time() - start
    assert set(found) == {"merge", "other", "background"}
    assert len(barriers) == 2
    assert 0.01 <= found["merge"] < 0.015
    assert 0.02 <= found["other"] < 0.03
    assert 0.06 <= 2 * sum(found.values()) <= whole


def test_timed_starts_after_the_barrier():
    took = timed(lambda: time.sleep(0.05), barrier=lambda: burn(0.05))
    assert 0.05 <= took.wall < 0.5
    assert took.cpu < 0.05


def tensors(settings, dtype=torch.float32):
    torch.manual_seed(settings.seed)
    heads = (settings.heads, settings.kv_heads, settings.kv_heads, settings.heads)
    shapes = ((1, count, settings.seqlen, settings.head_dim) for count in heads)
    return Inputs(*(torch.randn(shape, dtype=dtype) for shape in shapes))


def in_turns(settings, whole, kernels):
    """Forward and backward of all ranks in one process; whole tensors, and each rank's link."""
    layout, boxes = settings.whole_layout, Mailboxes()
    ranks = range(settings.world)
    local = [Inputs(*(layout.shard(x, rank=r, dim=2) for x in whole)) for r in ranks]
    links = [CountingLink(boxes.link(r)) for r in ranks]
    plans = [settings.plan("ring", r, head_chunks=1) for r in ranks]

    def one(r):
        q, k, v, grad = local[r]
        common = {"scale": q.shape[-1] ** -0.5, "link": links[r]}
        out, lse = yield from executor.forward(plans[r], kernels[r], q, k, v, **common)
        saved = executor.Saved(q, out, lse, grad)
        grads = yield from executor.backward(plans[r], kernels[r], saved, k, v, **common)
        return Attention(out, *grads)

    found = executor.together([one(r) for r in ranks])
    return Attention(*(layout.unshard(x, dim=2) for x in zip(*found, strict=True))), links


class Counting(type(KERNELS["sdpa"])):
    """Counts blocks, and the pairs in them."""

    def __init__(self):
        self.pairs = {"forward": 0, "backward": 0}

    def block(self, tile, *args, **kwargs):
        self.pairs["forward"] += tile.pairs
        return super().block(tile, *args, **kwargs)

    def block_backward(self, tile, *args, **kwargs):
        self.pairs["backward"] += tile.pairs
        return super().block_backward(tile, *args, **kwargs)


def test_ideal_repeats_exactly_the_kernel_calls_of_the_plan():
    settings = Settings(**OPTIONS)
    inner = [Counting() for _ in range(settings.world)]
    kernels = [KernelCalls(kernel) for kernel in inner]
    in_turns(settings, tensors(settings), kernels)
    for rank, (kernel, counted) in enumerate(zip(kernels, inner, strict=True)):
        work = settings.plan("ring", rank).work()
        assert counted.pairs == {"forward": work, "backward": work}
        kernel.again()
        kernel.again()
        assert counted.pairs == {"forward": 3 * work, "backward": 3 * work}


def test_counted_bytes_are_the_planned_ones():
    settings = Settings(**OPTIONS)
    _, links = in_turns(settings, tensors(settings), [KERNELS["sdpa"]] * 2)
    assert sum(x.bytes_sent for x in links) == settings.planned_bytes(Case("fp32", "ring", True))
    # All that a rank lacks of 256 tokens with one key head of 16: keys and values in the forward,
    # again in the backward, and their gradients. Of the last rank's late keys the first needs none.
    rows = 128 + 64
    assert sum(x.bytes_sent for x in links) == 3 * rows * 2 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_truth_judges_errors(dtype):
    settings = Settings(**{**OPTIONS, "documents": (100, 156)})
    whole = Inputs(*(x.to(dtype) for x in tensors(settings)))
    truth = Truth(whole, settings.mask)
    found, _ = in_turns(settings, whole, [KERNELS["sdpa"]] * 2)
    ratios = truth.ratios(found)
    assert set(ratios) == {"out", "dq", "dk", "dv"}
    assert 0 < max(ratios.values()) < (1e-13 if dtype == torch.float64 else 2)
    expected = oracle.attention(*whole, settings.mask)
    error = (found.dk.double() - expected.dk).abs().max().item()
    if dtype == torch.float64:
        assert ratios["dk"] == pytest.approx(error, abs=1e-15)
    else:
        single = oracle.single_device(*whole, settings.mask)
        yardstick = (single.dk.double() - expected.dk).abs().max().item()
        assert ratios["dk"] == pytest.approx(error / yardstick, rel=0.5)
    wrong = truth.ratios(found._replace(dv=found.dv + 1))
    assert wrong["dv"] > (0.9 if dtype == torch.float64 else 20)


def test_truth_divides_by_no_less_than_rounding():
    # A query that sees one key gets its value: one device makes no error.
    settings = Settings(**{**OPTIONS, "window": 0})
    whole = tensors(settings)
    zeros = torch.zeros_like(whole.q), torch.zeros_like(whole.k)
    dv = whole.grad_out.double().sum(1, keepdim=True).float()
    found = Attention(whole.v.expand(whole.q.shape).clone(), *zeros, dv)
    truth = Truth(whole, settings.mask)
    assert truth.ratios(found)["out"] == 0
    at = whole.v[0, 0].abs().argmin()  # where 1e-5 is added without rounding
    found.out[0, 0].view(-1)[at] += 1e-5
    floor = (whole.v.abs().max().item() + 1) * torch.finfo(torch.float32).eps / 2
    assert truth.ratios(found)["out"] == pytest.approx(1e-5 / floor, rel=0.01)


def test_long_truth_is_the_fused_kernel_in_double(monkeypatch):
    settings = Settings(**OPTIONS)
    whole = tensors(settings, torch.float64)
    found, _ = in_turns(settings, whole, [KERNELS["sdpa"]] * 2)
    monkeypatch.setattr("lightning_cp.cli.bench.attention.truth.MATHS", 255)
    assert max(Truth(whole, settings.mask).ratios(found).values()) < 1e-13


def test_call_alone_is_one_devices_attention():
    settings = Settings(**{**OPTIONS, "world": 1})
    whole = tensors(settings, torch.float64)
    link = Mailboxes().link(0)
    found = DistributedCall(settings.plan("ring", 0), KERNELS["sdpa"], whole, link)()
    expected = oracle.attention(*whole, Mask.causal(256))
    for name in Attention._fields:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


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
    settings = Settings(**OPTIONS)
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
    settings = Settings(**{**OPTIONS, "network": 1.0})
    report = Report.of(settings, made_up(settings))
    row = report.rows[0]
    assert row.efficiency == Spread(0.625, 0.625, 0.625)  # of 3/4 and 3/6
    assert (row.ideal_ms, row.real_ms) == (3000, 5000)
    assert (report.clock, report.link_rate) == ("wall", 0.8)


def test_files_between_processes(tmp_path):
    settings = Settings(**{**OPTIONS, "documents": (56, 200), "overlaps": (True, False)})
    launch = Launch(settings, first=True)
    launch.save(tmp_path / "job.json")
    assert Launch.load(tmp_path / "job.json") == launch
    for found in made_up(settings)[0]:
        found.save(tmp_path, 1)
        assert RankResult.load(tmp_path, 1) == found


def test_mask_and_cases_of_settings():
    chosen = {"documents": (56, 200), "window": 7, "overlaps": (True, False)}
    settings = Settings(**{**OPTIONS, **chosen, "dtypes": ("fp32", "bf16")})
    assert settings.mask == Mask(256, 256, documents=(0, 56, 256), window=(7, 0))
    assert settings.mask.visible(60, 56)
    assert not settings.mask.visible(60, 55)
    assert not settings.mask.visible(100, 92)
    assert [case.dtype for case in settings.cases] == ["fp32"] * 4 + ["bf16"] * 4
    assert settings.cases[:2] == (Case("fp32", "ring", True), Case("fp32", "ring", False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "0"], "--world 0 is less than 1; choose 1 or more"),
        (["--seqlen", "-1"], "--seqlen -1 is less than 1"),
        (["--repeats", "0"], "--repeats 0 is less than 1"),
        (["--heads", "8", "--kv-heads", "3"], "--kv-heads 3 does not divide --heads 8"),
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
    assert [row["exchange"] for row in found["rows"]] == ["allgather", "direct", "ring"]
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
    assert launch.settings.exchanges == ("allgather", "direct", "ring")
