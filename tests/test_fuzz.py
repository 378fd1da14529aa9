"""The search with random calls: what it draws, that right code passes, that faults are found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.cli.bench.fuzz import command
from lightning_cp.cli.bench.fuzz.cases import draw
from lightning_cp.cli.bench.fuzz.check import check, visible
from lightning_cp.cli.main import main
from lightning_cp.exchange import running
from lightning_cp.kernels.terms import Terms
from lightning_cp.mask import Mask, Rect
from lightning_cp.plan import SCHEDULES, build_plan
from lightning_cp.plan.direct import Direct
from lightning_cp.spans import Span, Spans
from tests._harness.simulate import dense

CASES = [draw(number, seed=5, most_tokens=40, most_ranks=6) for number in range(120)]


def test_draws_repeat_and_cover_what_there_is() -> None:
    assert draw(7, seed=5, most_tokens=40, most_ranks=6) == CASES[7]
    assert draw(7, seed=6, most_tokens=40, most_ranks=6) != CASES[7]
    assert {case.exchange for case in CASES} == set(SCHEDULES)
    assert {case.world for case in CASES} == set(range(1, 7))
    for name in ("documents", "keys", "window"):
        given = [getattr(case.mask, name) is not None for case in CASES]
        assert 0 < sum(given) < len(given), name
    for name in ("softcap", "sinks", "slopes", "table", "mask_mod"):
        given = [name in case.terms.names for case in CASES]
        assert 0 < sum(given) < len(given), name
    assert any(case.layouts[0] != case.layouts[1] for case in CASES)


def test_its_masks_are_the_definition() -> None:
    for case in CASES:
        shape = (case.batch, *(layout.length for layout in case.layouts))
        assert torch.equal(visible(case)[:, 0], torch.from_numpy(dense(case.mask, shape))), case


def test_every_call_is_right() -> None:
    for case in CASES:
        assert check(case) is None, case


def test_slopes_of_large_scores_are_as_right_as_on_one_rank() -> None:
    """One rank is 6e-12 off here, four are 1.2e-11: scores of 140 leave their weights no more."""
    assert check(draw(280, seed=6, most_tokens=64, most_ranks=8)) is None


def test_gradients_of_slopes_are_sums_of_distances() -> None:
    """1.4e-3 of 56 in float, where one rank is lucky: LSEs of 75 round by 4e-6, times 50 rows."""
    assert check(draw(3656, seed=7, most_tokens=64, most_ranks=8)) is None


def found() -> int:
    return sum(check(case) is not None for case in CASES)


def forgotten_window(mask: Mask, q: Span, k: Span) -> tuple[Rect, ...]:
    return (Rect(q, k, mask.is_causal),)


def lost_part(self: running.RunningAttention, part: Any) -> None:
    span = part.tile.q
    if self._rows.missing(span) == (span,):
        running_add(self, part)


def smaller_shard(self: Direct, owner: int, reader: int, demand: Any) -> Spans:
    return tuple((start, stop - 1) for start, stop in demand.wanted(owner, reader))


def uncapped(self: Terms, raw: Any) -> Any:
    found, _ = terms_apply(self, raw)
    return found, None


terms_apply = Terms.apply
running_add = running.RunningAttention.add


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Mask, "_narrowed", forgotten_window),
        (running.RunningAttention, "add", lost_part),
        (Direct, "carried", smaller_shard),
        (Terms, "apply", uncapped),
        (Terms, "_shown", lambda self: None),
        (Terms, "learn", lambda self, ds: None),
    ],
)
def test_a_fault_is_found(
    owner: type, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_plan.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        assert found() > 3
    build_plan.cache_clear()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert main(["bench", "fuzz", "--cases", "12", "--seed", "5", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert (content["cases"], content["seed"], content["failures"]) == (12, 5, 0)
    assert sum(count for kind, count in content["kinds"].items() if "exchange" in kind) == 12
    assert "12 calls, 0 wrong" in capsys.readouterr().out


def test_command_fails_where_a_call_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check", lambda case: "odd" if case.number == 3 else None)
    assert main(["bench", "fuzz", "--cases", "5", "--seed", "2"]) != 0
    said = capsys.readouterr()
    assert "call 3: odd" in said.out
    assert "--seed 2 --first 3 --cases 1" in said.err


@pytest.mark.parametrize("option", ["--cases", "--max-tokens", "--max-ranks"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fuzz", option, "0"]) != 0
    assert f"{option} 0 must be at least 1" in capsys.readouterr().err
