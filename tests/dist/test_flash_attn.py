"""Models that call the package flash_attn, by a stand-in on CPUs, on shards and on one device."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.api import ContextParallel
from lightning_cp.config import Config
from lightning_cp.errors import RefusedError
from tests._harness import flash_attn as standin
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 22, 4, 2, 5
EDGES = ((0, 1, 9, 10, 22), (0, 15, 16, 22))
"""Documents of each row."""

Batch = dict[str, Tensor]
Options = dict[str, Any]


def func(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options) -> Tensor:
    found: Tensor = package.flash_attn_func(q, k, v, **options)
    return found


def kvpacked(
    package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options
) -> Tensor:
    found: Tensor = package.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
    return found


def qkvpacked(
    package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options
) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    found: Tensor = package.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
    return found


def lse(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options) -> Tensor:
    """The LSE comes without a gradient."""
    out, lse, none = package.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert none.numel() == 0
    found: Tensor = out * lse.transpose(1, 2).unsqueeze(-1).detach()
    return found


def _varlen(
    package: Any, rows: tuple[Tensor, Tensor, Tensor], edges: Tensor, options: Options
) -> Tensor:
    flat = (x.flatten(0, 1) for x in rows)
    longest = int(edges.diff().max())
    found: Tensor = package.flash_attn_varlen_func(*flat, edges, edges, longest, longest, **options)
    return found.view_as(rows[0])


def by_rows(
    package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options
) -> Tensor:
    size = q.shape[1]
    edges = torch.tensor([0, size, 2 * size], dtype=torch.int32)
    return _varlen(package, (q, k, v), edges, options)


def whole(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options) -> Tensor:
    return _varlen(package, (q, k, v), batch["edges"], options)


def local(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options) -> Tensor:
    starts = (batch["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    edges = sorted({0, *starts, q.shape[1], 2 * q.shape[1]})
    return _varlen(package, (q, k, v), torch.tensor(edges, dtype=torch.int32), options)


def packed(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: Options) -> Tensor:
    """Both packed functions of variable lengths, each for half of the result."""
    edges, rows = batch["edges"], (q, *(x.repeat_interleave(2, 2) for x in (k, v)))
    flat = [x.flatten(0, 1) for x in rows]
    one = package.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), edges, 15, **options)
    other = package.flash_attn_varlen_kvpacked_func(
        flat[0], torch.stack(flat[1:], 1), edges, edges, 15, 15, **options
    )
    found: Tensor = (one + other / 2).view_as(q)
    return found


class Case(NamedTuple):
    call: Callable[..., Tensor]
    options: Options
    documents: bool = False


CASES = {
    "causal": Case(func, {"causal": True}),
    "bidirectional": Case(func, {"deterministic": True}),
    "window": Case(func, {"causal": True, "window_size": (4, 0)}),
    "two-sided": Case(func, {"window_size": (3, 2), "softmax_scale": 0.7}),
    "softcap": Case(func, {"causal": True, "softcap": 0.8}),
    "slopes": Case(func, {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
    "slopes in documents": Case(
        whole, {"softcap": 2.0, "alibi_slopes": torch.full([HEADS], 0.3)}, documents=True
    ),
    "kvpacked": Case(kvpacked, {"causal": True}),
    "qkvpacked": Case(qkvpacked, {"window_size": (5, -1)}),
    "lse": Case(lse, {"causal": True}),
    "rows": Case(by_rows, {"causal": True}),
    "whole edges": Case(whole, {"causal": True}, documents=True),
    "whole edges, bidirectional": Case(whole, {"window_size": (2, 2)}, documents=True),
    "local edges": Case(local, {"causal": True}, documents=True),
    "packed": Case(packed, {"causal": True}, documents=True),
}


class Model(nn.Module):
    """Embedding, attention and a head."""

    def __init__(self, package: Any, case: Case) -> None:
        super().__init__()
        self.package, self.case = package, case
        self.embed = nn.Embedding(30, 12)
        self.q = nn.Linear(12, HEADS * SIZE)
        self.kv = nn.Linear(12, 2 * KV_HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, 30)

    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, SIZE))
        k, v = self.kv(x).unflatten(-1, (2, KV_HEADS, SIZE)).unbind(2)
        return self.case.call(self.package, q, k, v, batch, self.case.options).flatten(2)

    def forward(self, batch: Batch) -> Tensor:
        found: Tensor = self.head(self.mixed(self.embed(batch["input_ids"]), batch))
        return found


class Recomputed(Model):
    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        found: Tensor = checkpoint(super().mixed, x, batch, use_reentrant=False)
        return found


class Compiled(Model):
    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        whole = torch.compile(super().mixed, backend="aot_eager", fullgraph=True)
        found: Tensor = whole(x, batch)
        return found


def _batch(documents: bool) -> Batch:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(30, (ROWS, LENGTH + 1), generator=generator)
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    if documents:
        spans = [torch.tensor(edges).diff().tolist() for edges in EDGES]
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in r]) for r in spans]
        )
        edges = [0, *(row * LENGTH + edge for row in range(ROWS) for edge in EDGES[row][1:])]
        batch["edges"] = torch.tensor(edges, dtype=torch.int32)
    return batch


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten())


def _model(package: Any, case: Case, kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return kind(package, case).double()


def _check(rank: int, world: int, name: str, kind: type[Model], **options: Any) -> None:
    case = CASES[name]
    with standin.installed() as package:
        expected, model = _model(package, case), _model(package, case, kind)
        reference = _loss(expected, _batch(case.documents))
        reference.backward()
        options["documents"] = "position_ids" if case.documents else "none"
        with one_group(rank, world, **options) as parallel:
            before = len(standin.CALLS)
            for _ in range(2):
                model.zero_grad()
                shard = parallel.shard(_batch(case.documents), module=model)
                with parallel.active(shard):
                    loss = _loss(model, shard.batch)
                    loss.backward()
                parallel.check(shard, loss)
            assert len(standin.CALLS) == before, "the stand-in computed something"
        again = _loss(model, _batch(case.documents))
    assert len(standin.CALLS) > before, "the package is back"
    for found in (loss, again):
        assert found.item() == pytest.approx(reference.item(), abs=1e-12), name
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.grad is not None
        dist.all_reduce(one.grad)
        torch.testing.assert_close(
            one.grad / world, other.grad, rtol=0, atol=1e-12, msg=lambda text: f"{name}: {text}"
        )


def _functions(rank: int, world: int, layout: str) -> None:
    for name in CASES:
        _check(rank, world, name, Model, layout=layout)


@pytest.mark.parametrize(
    ("world", "layout"), rotated([1, 2, 3], [("contiguous",), ("zigzag",)])
)
def test_functions_of_the_package(pool: Pool, world: int, layout: str) -> None:
    pool.run(_functions, layout, world=world)


def _kinds(rank: int, world: int) -> None:
    for name in ("window", "whole edges"):
        _check(rank, world, name, Recomputed)
        _check(rank, world, name, Compiled, exchange="ring")


def test_recomputed_and_compiled_calls(pool: Pool) -> None:
    pool.run(_kinds, world=2)


def _refusals(rank: int, world: int) -> dict[str, str]:
    """The message of every refusal; the first forward would be audited as well."""
    found = {}
    for name, (call, documents, _) in REFUSALS.items():
        with (
            standin.installed() as package,
            one_group(rank, world, documents="position_ids" if documents else "none") as parallel,
        ):
            model = _model(package, Case(call, {}))
            parallel.shard(_batch(documents), module=model).digest.wait()
            shard = parallel.shard(_batch(documents), module=model)
            with pytest.raises(RefusedError) as caught, parallel.active(shard):
                model(shard.batch)
            found[name] = str(caught.value)
    return found


def _with(**options: Any) -> Callable[..., Tensor]:
    def call(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, _: Options) -> Tensor:
        found: Tensor = package.flash_attn_func(q, k, v, **options)
        return found

    return call


def _at(*edges: int, **options: Any) -> Callable[..., Tensor]:
    def call(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, _: Options) -> Tensor:
        return _varlen(package, (q, k, v), torch.tensor(edges, dtype=torch.int32), options)

    return call


def _unpadded(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, _: Options) -> Tensor:
    rows = [x[:, 1:] for x in (q, k, v)]
    size = q.shape[1] - 1
    edges = torch.tensor([0, size, 2 * size], dtype=torch.int32)
    return _varlen(package, (rows[0], rows[1], rows[2]), edges, {})


def _cache(package: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, _: Options) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    found: Tensor = package.flash_attn_with_kvcache(q, k, v)
    return found


REFUSALS: dict[str, tuple[Callable[..., Tensor], bool, str]] = {
    "dropout": (_with(dropout_p=0.1), False, r"attention dropout of 0.1"),
    "slopes": (_with(alibi_slopes=torch.ones(2, HEADS)), False, r"alibi_slopes of shape \(2, 4\)"),
    "lengths": (_at(0, 3, 22), False, r"lengths \[0, 3, 22\] of this call.*position_ids \[B, S\]"),
    "rows in place of documents": (_at(0, 22, 44), True, r"lengths \[0, 22, 44\]"),
    "paged": (_at(0, 11, 22, block_table=torch.zeros(1)), False, r"\(block_table\)"),
    "unpadded": (_unpadded, False, r"20 packed tokens are not those of all rows"),
    "cache": (_cache, False, r"flash_attn_with_kvcache computes over this rank's tokens"),
}


def test_calls_that_cannot_be_meant(pool: Pool) -> None:
    for found in pool.run(_refusals, world=2):
        for name, message in found.items():
            assert message.startswith("the root module (Model, test_flash_attn.py:")
            assert re.search(REFUSALS[name][2], message), message
