"""`bench calibrate`: the fit, what is timed, and the file that it writes."""

import json
from dataclasses import asdict, replace

import pytest

from lightning_cp.balance import Balanced, CostModel, balanced
from lightning_cp.cli.bench.calibrate import command
from lightning_cp.cli.bench.calibrate.fit import Attended, Sent, Times, fitted, two_terms
from lightning_cp.cli.bench.calibrate.measure import Sizes, attended, quickest, sent, token_seconds
from lightning_cp.cli.main import main
from lightning_cp.errors import ContextParallelError
from tests._harness.ticking import Ticking

SIZES = Sizes(
    tokens=256, heads=2, kv_heads=1, head_dim=8, width=16, matrices=12, dtype="fp32", world=3,
    repeats=2,
)  # fmt: skip
MESSAGES = (8, 64, 4096)


class SlowLink:
    """Messages of which each takes a time by its size, of a clock that nothing else moves."""

    def __init__(self, *, latency, bandwidth):
        self.now, self.seen = 0.0, []
        self._latency, self._bandwidth = latency, bandwidth

    def clock(self):
        return self.now

    def exchange(self, sends, receives):
        [(to, out)], [(of, into)] = sends, receives
        assert out.nbytes == into.nbytes
        self.seen.append((of, to))
        self._size = out.nbytes
        return self

    def wait(self):
        self.now += self._latency + self._size / self._bandwidth


def test_constants_of_times_that_follow_the_model_are_found():
    truth = CostModel(
        pair=2e-10, token=3e-6, tile=40.0, key_bytes=2 * 8 * 12, bandwidth=5e8, latency=2e-5
    )
    kernel = Ticking(pair=truth.pair / 4, key=truth.pair * truth.tile / 4)
    pieces = attended(SIZES, kernel=kernel, clock=kernel.clock)
    assert [piece.queries for piece in pieces] == [16, 64, 256, 16, 64]
    assert [piece.pairs for piece in pieces[:3]] == [
        sum(range(257 - queries, 257)) for queries in (16, 64, 256)
    ]
    ticks = iter(range(100))
    token = token_seconds(SIZES, clock=lambda: truth.token * 256 / 12 * next(ticks))
    link, waits = SlowLink(latency=truth.latency, bandwidth=truth.bandwidth), []
    messages = sent(
        link, rank=2, world=3, repeats=2, barrier=lambda: waits.append(1), clock=link.clock,
        messages=MESSAGES,
    )  # fmt: skip
    assert link.seen == [(1, 0)] * 9
    assert len(waits) == 6
    found = fitted(Times(pieces, token, messages), key_bytes=SIZES.key_bytes)
    assert asdict(found) == pytest.approx(asdict(truth), rel=1e-9)


def test_bytes_of_a_key():
    assert SIZES.key_bytes == 2 * 1 * 8 * 3 * 4
    assert replace(SIZES, dtype="bf16").key_bytes == 2 * 1 * 8 * (2 * 2 + 4)
    assert replace(SIZES, dtype="fp64").key_bytes == 2 * 1 * 8 * 3 * 8


def test_the_fit_has_the_least_relative_errors():
    samples = [(1.0, 5.0, 2.0), (10.0, 4.0, 7.0), (300.0, 6.0, 100.0)]

    def loss(a, b):
        return sum(((a * x + b * y) / t - 1) ** 2 for x, y, t in samples)

    a, b = two_terms(samples)
    for step in (1e-3, -1e-3):
        assert loss(a, b) < min(loss(a * (1 + step), b), loss(a, b * (1 + step)))


def test_the_quickest_run_counts_and_the_first_does_not():
    now, waits = [0.0], []
    takes = iter([1.0, 5.0, 2.0, 7.0])

    def call():
        now[0] += next(takes)

    seconds = quickest(
        call, repeats=3, clock=lambda: now[0], barrier=lambda: waits.append(now.copy())
    )
    assert (seconds, len(waits)) == (2.0, 3)


@pytest.mark.parametrize(
    ("attention", "link", "name"),
    [
        ((5.0, 5.0), (1.0, 2.0), "seconds for a pair"),
        ((1.0, 5.0), (2.0, 1.0), "seconds for a byte"),
    ],
)
def test_times_that_do_not_grow_are_refused(attention, link, name):
    pieces = [
        Attended(queries, 10 * queries, x) for queries, x in zip((1, 10), attention, strict=True)
    ]
    times = Times(pieces, 1.0, [Sent(size, x) for size, x in zip((1, 9), link, strict=True)])
    with pytest.raises(ContextParallelError, match=f"the fit finds {name} .*, which cannot be"):
        fitted(times, key_bytes=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "63"], "--tokens 63 is less than 64"),
        (["--world", "1"], "--world 1 is less than 2"),
        (["--repeats", "0"], "--repeats 0 is less than 1"),
        (["--kv-heads", "3"], "--kv-heads 3 does not divide --heads 8"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message, tmp_path, capsys):
    file = tmp_path / "cost.json"
    assert main(["bench", "calibrate", *options, "--json", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert not file.exists()


def test_the_file_is_what_layouts_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_sent", lambda sizes: [Sent(100, 1e-5), Sent(10**6, 1e-3)])
    file, plan = tmp_path / "cost.json", tmp_path / "plan.json"
    options = ["--tokens", "512", "--heads", "2", "--width", "64", "--repeats", "3"]
    assert main(["bench", "calibrate", *options, "--json", str(file)]) == 0
    assert "cost model of a layer" in capsys.readouterr().out
    cost = CostModel.load(file)
    assert all(value > 0 for value in asdict(cost).values())
    assert cost.key_bytes == 2 * 2 * 64 * 8
    assert cost.bandwidth == pytest.approx((10**6 - 100) / (1e-3 - 1e-5))
    assert balanced((300, 20), 2, Balanced(cost_file=str(file))).length == 320
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300 20")
    options = ["--lengths", str(lengths), "--ranks", "2", "--cost", str(file), "--json", str(plan)]
    assert main(["plan", *options]) == 0
    assert json.loads(plan.read_text())["cost"] == asdict(cost)


@pytest.mark.dist
@pytest.mark.full
def test_processes_time_their_messages():
    found = command._sent(replace(SIZES, world=2, repeats=1))
    assert [message.size for message in found] == [2**12, 2**16, 2**20, 2**23]
    assert all(message.seconds > 0 for message in found)
