"""The strategy before any process exists: its name, its options, its arithmetic, its table."""

import inspect
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_cp import ContextParallelStrategy
from lightning_cp.api import Shard
from lightning_cp.config import Config
from lightning_cp.context import CallLog, Context, Served
from lightning_cp.data.cut import Rules, cut
from lightning_cp.diagnostics.slow import warn_of_reference
from lightning_cp.errors import ConfigError, ContextParallelWarning
from lightning_cp.mesh import Mesh
from lightning_cp.plan import Direct
from lightning_cp.plugin.table import StartTable, attended
from lightning_cp.topology import Topology
from tests._harness.models import overridden
from tests._harness.trainer import PoolEnvironment

OPTIONS: dict[str, Any] = {
    "layout": "contiguous",
    "exchange": "allgather",
    "overlap": False,
    "attention_backend": "reference",
    "attention_dropout": "tile",
    "documents": "none",
    "loss": "token_mean",
    "sequence_dims": {"tokens": 1, "scores": None},
    "pad_to_multiple_of": 8,
    "data": "broadcast",
    "shard_in": "main",
    "predict_gather": "all",
    "zero_stage": 3,
    "accumulate_gradients": "whole",
    "param_gather": "early",
    "verify": "first_batch",
}


def resolved(rank: int, world: int, nodes: int = 1, **options: Any) -> ContextParallelStrategy:
    """A strategy that knows its sizes, without processes."""
    strategy = ContextParallelStrategy(**options)
    strategy.cluster_environment = PoolEnvironment(rank, world)
    strategy.parallel_devices = [torch.device("cpu")] * (world // nodes)
    strategy._resolve(world, world // nodes)
    return strategy


def test_name_is_registered_by_the_import():
    assert "context_parallel" in StrategyRegistry.available_strategies()
    assert isinstance(StrategyRegistry.get("context_parallel"), ContextParallelStrategy)


def test_trainer_takes_the_name():
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="context_parallel", logger=False, barebones=True
    )
    assert isinstance(trainer.strategy, ContextParallelStrategy)
    assert trainer.strategy.num_processes == 2
    assert not overridden()


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_trainer_takes_an_instance_with_any_precision(precision):
    strategy = ContextParallelStrategy(context_parallel_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, barebones=True
    )
    assert trainer.strategy is strategy
    assert isinstance(strategy, ParallelStrategy)
    assert not isinstance(strategy, ModelParallelStrategy)  # its instances refuse some of these


def test_constructor_needs_nothing_and_documents_everything():
    parameters = inspect.signature(ContextParallelStrategy).parameters
    text = inspect.getdoc(ContextParallelStrategy) or ""
    for name, parameter in parameters.items():
        assert parameter.default is not inspect.Parameter.empty, name
        assert parameter.annotation is not inspect.Parameter.empty, name
        assert f"    {name}: " in text, name
    assert set(parameters) >= {field.name for field in fields(Config)}


def test_options_arrive():
    assert set(OPTIONS) == {field.name for field in fields(Config)}
    assert ContextParallelStrategy(**OPTIONS)._config == Config(**OPTIONS)
    assert ContextParallelStrategy()._config == Config()
    timed = ContextParallelStrategy(process_group_backend="gloo", timeout=timedelta(seconds=5))
    assert (timed._process_group_backend, timed._timeout) == ("gloo", timedelta(seconds=5))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "layout",
            "spiral",
            r"layout='spiral' is unknown; use one of auto, balanced, contiguous, "
            "per_document_zigzag, zigzag",
        ),
        (
            "exchange",
            "pigeon",
            r"exchange='pigeon' .* auto, allgather, direct, hybrid, ring, ulysses",
        ),
        (
            "exchange",
            Direct,
            r"Direct.*auto, allgather, direct, hybrid, ring, ulysses.* or Direct\(\), Ring\(\)",
        ),
        ("attention_backend", "magic", r"use one of auto, cudnn, efficient, flash, .*sdpa"),
        ("documents", "maybe", r"documents='maybe' .* auto, position_ids, none"),
        ("pad_to_multiple_of", 0, r"pad_to_multiple_of=0 must be a positive integer"),
        ("pad_to_multiple_of", True, r"pad_to_multiple_of=True must be a positive integer"),
        ("sequence_dims", ["tokens"], r"sequence_dims=\['tokens'\] must map field names"),
        ("sequence_dims", {"tokens": "1"}, r"must map field names to a dimension"),
        ("sequence_dims", {0: 1}, r"must map field names to a dimension"),
        ("shard_in", "gpu", r"shard_in='gpu' .* auto, worker, main"),
        ("zero_stage", 4, r"zero_stage=4: use 0 .*, 1 .*, 2 .* or 3 "),
        ("accumulate_gradients", "half", r"accumulate_gradients='half' .* auto, whole, parts"),
        ("accumulate_gradients", "parts", r"'parts' .* zero_stage=0 does not; use zero_stage=2"),
    ],
)
def test_bad_option_is_refused_at_once(option, value, message):
    with pytest.raises(ConfigError, match=message):
        ContextParallelStrategy(**{option: value})


@pytest.mark.parametrize("other", [{"data": "broadcast"}, {"verify": "first_batch"}])
def test_whole_batches_and_workers_that_cut_are_refused_together(other):
    with pytest.raises(ConfigError, match=r"needs them whole; use shard_in='auto' or 'main'"):
        ContextParallelStrategy(shard_in="worker", **other)


def test_topology_is_unknown_before_setup():
    strategy = ContextParallelStrategy(context_parallel_size=2)
    with pytest.raises(RuntimeError, match=r"in or after LightningModule\.setup\(\)"):
        strategy.topology  # noqa: B018  (a property that raises)
    with pytest.raises(RuntimeError, match="sizes of the parallel axes"):
        strategy.distributed_sampler_kwargs  # noqa: B018  (a property that raises)
    assert strategy.is_distributed


@pytest.mark.parametrize(
    ("options", "world", "nodes", "expected"),
    [
        ({}, 4, 1, (1, 4)),
        ({}, 8, 2, (2, 4)),
        ({"context_parallel_size": 2}, 4, 1, (2, 2)),
        ({"data_parallel_size": 2}, 4, 1, (2, 2)),
        ({"context_parallel_size": 1}, 4, 1, (4, 1)),
        ({"context_parallel_size": 2, "data_parallel_size": 2}, 4, 1, (2, 2)),
        ({}, 1, 1, (1, 1)),
    ],
)
def test_sizes(options, world, nodes, expected):
    strategy = resolved(0, world, nodes, **options)
    assert (strategy.topology.dp, strategy.topology.cp) == expected
    assert strategy.is_distributed == (expected[0] > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_parallel_size": 8}, r"context_parallel_size=8 does not divide the 4 processes"),
        ({"context_parallel_size": 0}, r"context_parallel_size=0: a size must be"),
        ({"context_parallel_size": 3}, r"use one of \[1, 2, 4\]"),
        ({"context_parallel_size": 2, "data_parallel_size": 4}, r"= 8 ranks, but the job has 4"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        resolved(0, 4, **options)


def test_group_over_several_nodes_is_warned_of():
    with pytest.warns(UserWarning, match=r"group of 8 ranks spans nodes of 4"):
        resolved(0, 8, 2, context_parallel_size=8)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_samplers_count_virtual_devices(cp):
    found = [
        resolved(rank, 4, context_parallel_size=cp).distributed_sampler_kwargs for rank in range(4)
    ]
    assert found == [{"num_replicas": 4 // cp, "rank": rank // cp} for rank in range(4)]


def table(
    dp: int, cp: int, batch: dict[str, torch.Tensor], rank: int = 0, **options: Any
) -> tuple[StartTable, Shard]:
    """The table of one rank, and the shard it is about."""
    config = Config(**options)
    topology = Topology(dp=dp, cp=cp)
    layout = "zigzag" if config.layout == "auto" else config.layout
    rules = Rules(
        layout=layout,
        takes_positions=True,
        sequence_dims=config.sequence_dims,
        pad_to_multiple_of=config.pad_to_multiple_of,
    )
    place = topology.coordinates(rank).cp
    part = cut(batch, rules, rank=place, world=cp)
    context = Context(
        rank=place,
        world=cp,
        group=None,
        meta=None,
        sequences={"sequence": part.sequence},
        exchange="ring" if config.exchange == "auto" else config.exchange,
        kernel=config.attention_backend,
    )
    groups: Any = dict.fromkeys(("cp", "cp_a2a", "meta", "grad", "dp", "device"))
    mesh: Any = Mesh(topology=topology, rank=rank, **groups)
    digest: Any = None
    return StartTable(mesh, config), Shard(part.batch, context, part, layout, digest, True)


QUERIES = torch.empty(1, 1, 1, 64)


def on_cuda(dtype: torch.dtype) -> Any:
    """All that kernels ask of a tensor, as if there was a device."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=QUERIES.shape)


@pytest.mark.parametrize(
    ("given", "queries", "words"),
    [
        ("sdpa", QUERIES.double(), "sdpa (sdpa, for float64 on cpu)"),
        ("reference", QUERIES, "reference"),
        (
            "auto",
            on_cuda(torch.bfloat16),
            "flash (auto, for bfloat16 on cuda; the sdpa kernel has no path",
        ),
        (
            "auto",
            on_cuda(torch.float32),
            "efficient (auto, for float32 on cuda; the sdpa kernel has no path",
        ),
        ("flash", QUERIES, "none: attention_backend='flash': the flash kernel runs on CUDA"),
    ],
)
def test_table_says_which_kernel_is_taken(given, queries, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    start, shard = table(1, 2, {"input_ids": torch.zeros(1, 8)}, attention_backend=given)
    found = dict(start.rows(shard, "in a test", queries))["attention kernel"]
    assert found.startswith(words)


def log_of(*kinds: Served, kernel: str = "auto") -> Any:
    """A context whose calls these kernels computed."""
    return SimpleNamespace(log=CallLog(kernels=dict.fromkeys(kinds)), kernel=kernel, rank=0)


PLAIN = Served("sdpa", (), (), (64, 64), torch.float32)
CAPPED = Served(
    "reference", ("the sdpa kernel computes no softcap",), ("softcap",), (16, 8), torch.float32
)


def test_kernels_of_other_calls_are_said_once(capsys):
    start, shard = table(1, 2, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)})
    start.served(log_of(CAPPED))
    assert capsys.readouterr().out == ""  # nothing differs from a table that is not shown
    start.show(shard, "in a test", QUERIES)
    capsys.readouterr()
    for kinds, times in (((PLAIN,), 0), ((PLAIN, CAPPED), 1), ((CAPPED,), 0)):
        start.served(log_of(*kinds))
        said = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
        assert said.count("attention kernels of other calls") == times
        assert said.count("with softcap (float32, heads of") == times
        assert said.count("reference; the sdpa kernel") == times
        assert "plain" not in said


def test_the_slow_reference_is_warned_of():
    assert not warn_of_reference(log_of(PLAIN))
    assert not warn_of_reference(log_of(CAPPED, kernel="reference"))
    words = r"took the reference.*calls with softcap: the sdpa kernel computes no softcap; say att"
    with pytest.warns(ContextParallelWarning, match=words):
        assert warn_of_reference(log_of(PLAIN, CAPPED))


@pytest.mark.parametrize(
    ("option", "rows"),
    [
        ("refuse", []),
        ("tile", ["numbers of every call, rank and block (tile)"]),
        ("off", ["left out (off)"]),
    ],
)
def test_table_says_what_becomes_of_attention_dropout(option, rows):
    start, shard = table(1, 2, {"input_ids": torch.zeros(1, 8)}, attention_dropout=option)
    found = start.rows(shard, "in a test", QUERIES)
    assert [value for name, value in found if name == "attention dropout"] == rows


@pytest.mark.parametrize(
    ("precision", "policy", "dtype"),
    [
        ("32-true", None, torch.float32),
        ("64-true", None, torch.float64),
        ("bf16-true", None, torch.bfloat16),
        ("bf16-mixed", None, torch.bfloat16),
        ("32-true", torch.bfloat16, torch.bfloat16),
        ("16-true", None, torch.float16),
    ],
)
def test_dtype_of_queries_is_that_of_the_step(precision, policy, dtype):
    plugin = pl.Trainer(accelerator="cpu", precision=precision, logger=False).precision_plugin
    module = plugin.convert_module(torch.nn.Linear(2, 2))
    given = None if policy is None else MixedPrecisionPolicy(param_dtype=policy)
    found = attended(module, plugin, given, torch.device("cpu"))
    assert (found.dtype, found.device.type) == (dtype, "cpu")


def test_table_of_numbers():
    batch = {"input_ids": torch.zeros(3, 21, dtype=torch.int64), "labels": torch.ones(3, 21)}
    start, shard = table(2, 2, batch, pad_to_multiple_of=8)
    rows = dict(start.rows(shard, "in a test", QUERIES))
    assert rows["data x context ranks"] == "2 x 2 = 4"
    assert rows["context groups"] == "[0, 1]; [2, 3]"
    assert rows["global batch"] == "6 rows, 126 tokens per micro-step"
    assert rows["fields cut (dim)"] == "input_ids (1), labels (1)"
    assert rows["fields added"] == "position_ids"
    assert rows["cut"] == "in a test"
    assert rows["tokens per rank"] == "12, 12"
    assert rows["dummy tokens per row"] == "3"
    assert rows["layout"] == "zigzag (auto)"
    assert rows["exchange"] == "ring (auto)"
    assert rows["attention kernel"] == "sdpa (auto, for float32 on cpu)"


def test_table_of_choices():
    batch = {"scores": torch.zeros(10, 2), "position_ids": torch.arange(10)[None]}
    start, shard = table(
        1,
        3,
        batch,
        layout="contiguous",
        exchange="allgather",
        attention_backend="reference",
        documents="none",
        sequence_dims={"scores": 0},
    )
    rows = dict(start.rows(shard, "in a test", QUERIES))
    assert rows["data x context ranks"] == "1 x 3 = 3"
    assert rows["fields cut (dim)"] == "scores (0), position_ids (1)"
    assert rows["fields added"] == "none"
    assert rows["tokens per rank"] == "4, 3, 3"
    assert rows["dummy tokens per row"] == "0"
    assert rows["layout"] == "contiguous"
    assert rows["exchange"] == "allgather"
    assert rows["attention kernel"] == "reference"
    assert "'none'" in rows["documents"]


def test_table_is_printed_once_on_the_first_rank(capsys):
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    for rank, times in ((0, 1), (1, 0)):
        start, shard = table(1, 2, batch, rank)
        start.show(shard, "in a test", QUERIES)
        start.show(shard, "in a test", QUERIES)
        printed = capsys.readouterr().out
        assert printed.count("context parallelism") == times
        assert printed.count("8 tokens per micro-step") == times


def test_one_device_starts_no_processes():
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="context_parallel", logger=False)
    assert trainer.strategy.launcher is None
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="context_parallel", logger=False)
    assert trainer.strategy.launcher is not None
