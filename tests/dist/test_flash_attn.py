"""Models that call the package flash_attn, by a stand-in on CPUs, on shards and on one device."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp.errors import RefusedError
from tests._harness import flash_attn as standin
from tests._harness.attending import (
    HEADS,
    KV_HEADS,
    Attending,
    Batch,
    assert_gradients,
    assert_loss,
    loss_of,
    second_step,
    text,
)
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

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


class Model(Attending):
    """Calls the package as a case says."""

    def __init__(self, package: Any, case: Case) -> None:
        super().__init__()
        self.package, self.case = package, case

    def attended(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return self.case.call(self.package, q, k, v, batch, self.case.options)


class Recomputed(Model):
    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        found: Tensor = checkpoint(super().mixed, x, batch, use_reentrant=False)
        return found


class Compiled(Model):
    def mixed(self, x: Tensor, batch: Batch) -> Tensor:
        whole = torch.compile(super().mixed, backend="aot_eager", fullgraph=True)
        found: Tensor = whole(x, batch)
        return found


def _model(package: Any, case: Case, kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return kind(package, case).double()


def _check(rank: int, world: int, name: str, kind: type[Model], **options: Any) -> None:
    case, batch = CASES[name], text(documents=CASES[name].documents)
    with standin.installed() as package:
        expected, model = _model(package, case), _model(package, case, kind)
        reference = loss_of(expected, batch)
        reference.backward()
        options["documents"] = "position_ids" if case.documents else "none"
        with one_group(rank, world, **options) as parallel:
            before = len(standin.CALLS)
            loss = second_step(parallel, model, batch)
            assert len(standin.CALLS) == before, "the stand-in computed something"
        again = loss_of(model, batch)
    assert len(standin.CALLS) > before, "the package is back"
    for found in (loss, again):
        assert_loss(found, reference, name)
    assert_gradients(model, expected, world=world, name=name)


def _functions(rank: int, world: int, layout: str) -> None:
    for name in CASES:
        _check(rank, world, name, Model, layout=layout)


@pytest.mark.parametrize(("world", "layout"), rotated([1, 2, 3], [("contiguous",), ("zigzag",)]))
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
            parallel.shard(text(documents=documents), module=model).digest.wait()
            shard = parallel.shard(text(documents=documents), module=model)
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
