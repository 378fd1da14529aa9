"""What the monitor logs, against values by hand, and plans that are made in loader workers."""

from dataclasses import replace
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_cp import ContextParallelMonitor
from lightning_cp.balance import layout_of
from lightning_cp.balance.layouts import Padding
from lightning_cp.errors import ConfigError, ContextParallelWarning
from lightning_cp.mask import Mask
from lightning_cp.plugin import pytorch_lightning as other
from tests._harness.models import Case, LanguageModel, loaders
from tests._harness.monitored import Run, Seen, monitored
from tests._harness.packed import counted
from tests._harness.sharded import needs_sharding

pytestmark = pytest.mark.dist

ROW = 2 * 4 * 8  # elements of a key and a value of a position: 2 rows, 4 heads, 4 channels each
BLOCKS = 2
PACKED = ((9, 1, 14), (20, 3), (5, 5, 5, 6), (30,))
DOUBLE = Case(lengths=(23,), precision="64-true")


class Expected(NamedTuple):
    """Figures of a step by hand.

    Attributes:
        tokens: of every rank.
        pairs: that a head of every rank computes for one row.
        received: keys that all ranks receive.
    """

    tokens: tuple[int, ...]
    pairs: tuple[int, ...]
    received: int


# 23 tokens: ranks 0 and 1 hold 12 and 11, and rank 1 needs the 12.
CONTIGUOUS = Expected((12, 11), (12 * 13 // 2, 276 - 78), 12)
# 24 tokens in 6 runs of 4: rank r holds runs r and 5 - r, and needs what is before the latter.
ZIGZAG = Expected((8, 8, 8), (100, 100, 100), 16 + 12 + 8)


def check(row: dict[str, float], expected: Expected, itemsize: int, elements: int = ROW) -> None:
    """A logged row is what was counted by hand."""
    world = len(expected.tokens)
    for name, loads in (("tokens", expected.tokens), ("work", expected.pairs)):
        assert row[f"cp/{name}_max_over_mean"] == pytest.approx(max(loads) * world / sum(loads))
    one = elements * expected.received
    there_again_and_back = one * (2 * itemsize + max(itemsize, 4))
    assert row["cp/kv_bytes"] == BLOCKS * there_again_and_back


def figures(found: list[Seen]) -> list[dict[str, float]]:
    """The rows of the monitor; only the first rank writes any."""
    assert [bool(seen.rows) for seen in found] == [True, *[False] * (len(found) - 1)]
    return [row for row in found[0].rows if "cp/kv_bytes" in row]


@pytest.mark.parametrize(
    ("run", "options", "expected", "itemsize"),
    [
        (Run(case=DOUBLE), {"layout": "contiguous"}, CONTIGUOUS, 8),
        (Run(case=Case()), {"layout": "zigzag"}, ZIGZAG, 4),
        (
            Run(case=DOUBLE, package="pytorch_lightning"),
            {"layout": "contiguous"},
            CONTIGUOUS,
            8,
        ),
        pytest.param(
            Run(case=DOUBLE),
            {"layout": "contiguous", "zero_stage": 3},
            CONTIGUOUS,
            8,
            marks=needs_sharding,
        ),
    ],
    ids=["contiguous", "zigzag", "other package", "zero 3"],
)
def test_rows_by_hand(run, options, expected, itemsize, pool, tmp_path):
    found = pool.run(monitored, run, options, tmp_path, world=len(expected.tokens))
    rows = figures(found)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        check(row, expected, itemsize)
        assert row["cp/tokens_per_second"] == 2 * run.case.lengths[0]  # a second from row to row
    assert found[0].of("plans_built") == [1, 0, 0]
    assert all(seconds > 0 for seconds in found[0].of("plan_seconds"))


def test_every_second_step_of_two_devices_with_padding(pool, tmp_path):
    """Samples hide 3, 4, 5, 6, 3, ... tokens; both devices read all of them."""
    trainer = {"use_distributed_sampler": False, "log_every_n_steps": 2}
    case = replace(DOUBLE, samples=16, padding=("left", "right"), trainer=tuple(trainer.items()))
    options = {"context_parallel_size": 2, "layout": "contiguous"}
    rows = figures(pool.run(monitored, Run(case=case), options, tmp_path, world=4))
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    seen = [23 - 3 - index % 4 for index in range(16)]
    tokens = [2 * sum(seen[at : at + 4]) for at in range(0, 16, 4)]
    assert [row["cp/tokens_per_second"] for row in rows] == tokens
    assert all(row["cp/tokens_max_over_mean"] == 12 / 11.5 for row in rows)


def test_micro_batches_of_a_step_add_up(pool, tmp_path):
    trainer = (("accumulate_grad_batches", 2),)
    case = replace(DOUBLE, lengths=(23, 9), samples=8, recomputed="blocks", trainer=trainer)
    rows = figures(pool.run(monitored, Run(case=case), {"layout": "contiguous"}, tmp_path, world=2))
    assert len(rows) == 2
    for row in rows:
        assert row["cp/tokens_per_second"] == 2 * (23 + 9)
        assert row["cp/tokens_max_over_mean"] == (12 + 5) / (11.5 + 4.5)
        assert row["cp/work_max_over_mean"] == (198 + 30) / (276 / 2 + 45 / 2)
        # Recomputation moves the keys of a block once more.
        assert row["cp/kv_bytes"] == BLOCKS * ROW * (12 + 5) * 8 * 4


def test_validation_is_logged_where_it_is_asked_for_and_its_time_left_out(pool, tmp_path):
    run = Run(case=replace(DOUBLE, epochs=2), validation=True, validate=True)
    for on in (True, False):
        folder = tmp_path / str(on)
        asked = replace(run, validation=on)
        (seen, _) = pool.run(monitored, asked, {"layout": "contiguous"}, folder, world=2)
        # Twice the clock is looked at between the row before validation and the row after it.
        assert seen.of("tokens_per_second") == [46, 46, 46, 46 / 2, 46, 46]
        found = [row for row in seen.rows if "cp/val_kv_bytes" in row]
        assert len(found) == 2 * on
        for row in found:
            assert row["cp/val_kv_bytes"] == 2 * BLOCKS * ROW * 12 * 8  # 2 batches, no backward
            assert row["cp/val_work_max_over_mean"] == 198 / 138
            assert row["cp/val_tokens_per_second"] == 2 * 2 * 23


@pytest.mark.parametrize(
    "layout",
    [
        "balanced",
        *(pytest.param(x, marks=pytest.mark.full) for x in ("per_document_zigzag", "zigzag")),
    ],
)
def test_packed_rows_element_by_element(layout, pool, tmp_path):
    run = Run(case=Case(precision="64-true"), documents=PACKED)
    options = {"layout": layout, "documents": "position_ids"}
    rows = figures(pool.run(monitored, run, options, tmp_path, world=3))
    for row, lengths in zip(rows, PACKED, strict=True):
        held = layout_of(layout, lengths, 3, padding=Padding(2))
        edges = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        loads = counted(held, Mask.packed(edges))
        check(row, Expected(held.sizes, loads.work, sum(loads.received)), 8, ROW // 2)


def test_what_auto_chose_is_logged(pool, tmp_path):
    run = Run(case=DOUBLE)
    (seen, _) = pool.run(monitored, run, {}, tmp_path / "auto", world=2)
    for row in figures([seen, Seen([], [])]):
        chosen = {name: row[name] for name in row if "layout_" in name or "exchange_" in name}
        assert chosen.pop("cp/layout_zigzag") == chosen.pop("cp/exchange_direct") == 1
        assert set(chosen.values()) == {0}
        assert {"cp/layout_balanced", "cp/exchange_ring"} <= chosen.keys()
    given = {"layout": "zigzag", "exchange": "ring"}
    (seen, _) = pool.run(monitored, run, given, tmp_path / "given", world=2)
    assert not any("layout_" in name or "exchange_" in name for row in seen.rows for name in row)


def test_workers_make_the_plans_of_packed_rows(pool, tmp_path):
    run = Run(case=Case(precision="64-true", epochs=2), documents=PACKED)
    options = {"layout": "balanced", "documents": "position_ids"}
    main = pool.run(monitored, run, options, tmp_path / "main", world=2)
    found = pool.run(monitored, replace(run, workers=1), options, tmp_path / "worker", world=2)
    assert main[0].of("plans_built") == [1, 1, 1, 1, 0, 0, 0, 0]  # the second epoch is cached
    assert found[0].of("plans_built") == 8 * [0]
    assert sum(found[0].of("plans_built")) < sum(main[0].of("plans_built"))
    for one, another in zip(figures(main), figures(found), strict=True):
        assert one["cp/kv_bytes"] == another["cp/kv_bytes"]
    for one, another in zip(main, found, strict=True):
        assert all(map(torch.equal, one.parameters, another.parameters))


def test_a_plan_for_other_calls_is_not_used(pool, tmp_path):
    """Workers expect causal attention until they know better, which is in the second epoch."""
    run = Run(case=Case(precision="64-true", epochs=2), documents=PACKED, is_causal=False)
    options = {"layout": "balanced", "documents": "position_ids"}
    main = pool.run(monitored, run, options, tmp_path / "main", world=2)
    found = pool.run(monitored, replace(run, workers=1), options, tmp_path / "worker", world=2)
    assert found[0].of("plans_built") == [1, 1, 1, 1, 0, 0, 0, 0]
    for one, another in zip(main, found, strict=True):
        for a, b in zip(one.parameters, another.parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


@pytest.mark.parametrize(
    ("strategy", "logger", "words"),
    [
        ("auto", True, "this Trainer has SingleDeviceStrategy; use strategy='context_parallel'"),
        ("context_parallel", False, "loggers, and it has 0; use a logger"),
    ],
)
def test_what_there_is_nothing_to_log_for(strategy, logger, words, tmp_path):
    trainer = pl.Trainer(
        strategy=strategy,
        devices=1,
        logger=CSVLogger(tmp_path) if logger else False,
        callbacks=[ContextParallelMonitor()],
        **OPTIONS,
    )
    with pytest.raises(ConfigError, match=words):
        trainer.fit(LanguageModel(Case()), *loaders(Case()))


def test_one_rank_has_nothing_to_share(tmp_path):
    trainer = pl.Trainer(
        strategy="context_parallel", devices=1, logger=CSVLogger(tmp_path), **OPTIONS
    )
    trainer.strategy.setup_environment()
    with pytest.warns(ContextParallelWarning, match="context_parallel_size is 1 on 1 devices"):
        ContextParallelMonitor().setup(trainer, None, "fit")


def test_the_public_name_is_that_of_the_lightning_in_use():
    assert issubclass(ContextParallelMonitor, pl.Callback)
    assert issubclass(other.ContextParallelMonitor, pytorch_lightning.Callback)
    assert ContextParallelMonitor.__doc__ == other.ContextParallelMonitor.__doc__
