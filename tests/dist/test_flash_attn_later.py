"""Models that call flash-attn 3 and 4, by stand-ins on CPUs, on shards and on one device."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.errors import RefusedError
from tests._harness import flash_attn_later as standin
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
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

Call = Callable[["Model", Tensor, Tensor, Tensor, Batch], Tensor]


def third(**options: Any) -> Call:
    def call(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        found: Tensor = model.packages[0].flash_attn_func(q, k, v, **options)
        return found

    return call


def fourth(**options: Any) -> Call:
    def call(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        found: Tensor = model.packages[1].flash_attn_func(q, k, v, **options)[0]
        return found

    return call


def lse_of_third(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """It comes without a gradient, as in the package."""
    function = model.packages[0].flash_attn_func
    out, lse = function(q, k, v, causal=True, return_attn_probs=True)
    found: Tensor = out * lse.detach().transpose(1, 2).unsqueeze(-1)
    return found


def sinks_of_fourth(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    function = model.packages[1].flash_attn_func
    out, lse = function(q, k, v, window_size=(4, 2), learnable_sink=model.sinks, return_lse=True)
    found: Tensor = out * lse.detach().transpose(1, 2).unsqueeze(-1)
    return found


def packed(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """In one tensor, with as many key heads and with fewer."""
    function = model.packages[0].flash_attn_qkvpacked_func
    mixed = function(torch.cat([q, k, v], 2), num_heads_q=HEADS, causal=True, softcap=1.5)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    found: Tensor = mixed + function(torch.stack([q, k, v], 2), softmax_scale=0.3) / 2
    return found


def _flat(number: int, edges_of: str, **options: Any) -> Call:
    def call(model: "Model", q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        own = torch.tensor([0, q.shape[1], 2 * q.shape[1]], dtype=torch.int32)
        edges = own if edges_of == "rows" else batch["edges"]
        longest = int(edges.diff().max())
        lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
        lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = model.packages[number].flash_attn_varlen_func(*flat, **lengths, **options)
        out: Tensor = found if isinstance(found, Tensor) else found[0]
        return out.view_as(q)

    return call


CASES: dict[str, tuple[Call, bool]] = {
    "3 causal": (third(causal=True, pack_gqa=True, num_splits=2), False),
    "3 window": (third(window_size=(3, -1), softcap=2.0), False),
    "3 lse": (lse_of_third, False),
    "3 packed": (packed, False),
    "3 rows": (_flat(0, "rows", causal=True), False),
    "3 documents": (_flat(0, "documents", causal=True, window_size=(5, 0)), True),
    "4 causal": (fourth(causal=True, softcap=0.8), False),
    "4 empty window": (fourth(window_size=(-1, -1), softmax_scale=0.7), False),
    "4 sinks": (sinks_of_fourth, False),
    "4 documents": (_flat(1, "documents", window_size=(None, 3)), True),
}
"""Calls, and whether rows hold documents."""


class Model(Attending):
    """Calls the packages as a function says."""

    def __init__(self, packages: Any, call: Call) -> None:
        super().__init__()
        self.packages, self.call = packages, call
        self.sinks = nn.Parameter(torch.tensor([0.3, 2.0, -1.0, -60.0]))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return self.call(self, q, k, v, batch)

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + 0 * self.sinks.sum()


def _model(packages: Any, call: Call) -> Model:
    torch.manual_seed(0)
    return Model(packages, call).double()


def _right(rank: int, world: int, layout: str) -> None:
    for name, (call, documents) in CASES.items():
        options = {"documents": "position_ids" if documents else "none", "layout": layout}
        batch = text(documents=documents)
        with standin.installed() as packages:
            expected, model = _model(packages, call), _model(packages, call)
            reference = loss_of(expected, batch)
            reference.backward()
            with one_group(rank, world, **options) as parallel:
                loss = second_step(parallel, model, batch)
            again = loss_of(model, batch)
        for found in (loss, again):
            assert_loss(found, reference, name)
        assert_gradients(model, expected, world=world, name=name)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "zigzag"),
        pytest.param(1, "contiguous", marks=pytest.mark.full),
        pytest.param(3, "zigzag", marks=pytest.mark.full),
        pytest.param(3, "contiguous", marks=pytest.mark.full),
    ],
)
def test_functions_of_both_versions(pool: Pool, world: int, layout: str) -> None:
    pool.run(_right, layout, world=world)


def _cache(model: Model, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    found: Tensor = model.packages[0].flash_attn_with_kvcache(q, k, v)
    return found


def _of_lse(model: Model, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    out, lse = model.packages[1].flash_attn_func(q, k, v)
    found: Tensor = out * lse.transpose(1, 2).unsqueeze(-1)
    return found


ONE = torch.ones(1)
REFUSALS: dict[str, tuple[Call, str]] = {
    "qv": (third(qv=ONE), r"a second product of queries, with values \(qv\) is not supported"),
    "descale": (third(k_descale=ONE), r"keys in 8 bits \(k_descale\)"),
    "chunk": (third(attention_chunk=4), r"attend\(chunk=...\), \(attention_chunk\)"),
    "used": (_flat(0, "rows", seqused_k=ONE), r"keys that are not used \(seqused_k\)"),
    "pages": (_flat(1, "rows", page_table=ONE), r"a paged cache of keys \(page_table\)"),
    "mask": (fourth(mask_mod=len), r"attend\(mask_mod=...\), \(mask_mod\)"),
    "score": (fourth(score_mod=len), r"a function of scores \(score_mod\)"),
    "other": (fourth(aux_scalars=(1,)), r"an argument that is not known \(aux_scalars\)"),
    "bits": (third(deterministic=True), r"torch\.use_deterministic_algorithms\(True\)"),
    "itself": (fourth(window_size=(5, -1)), r"window_size=\(5, -1\) leaves out the query's own"),
    "documents": (_flat(1, "documents"), r"lengths \[0, 1, 9, .* are not those of the documents"),
    "cache": (_cache, r"flash_attn_with_kvcache computes over this rank's tokens"),
}


def _refused(rank: int, world: int) -> dict[str, str]:
    found = {}
    torch.use_deterministic_algorithms(False)  # ranks of the pool are told so
    for name, (call, _) in REFUSALS.items():
        with standin.installed() as packages, one_group(rank, world, documents="none") as parallel:
            model = _model(packages, call)
            parallel.shard(text(documents=True), module=model).digest.wait()
            shard = parallel.shard(text(documents=True), module=model)
            with pytest.raises(RefusedError) as caught, parallel.active(shard):
                model(shard.batch)
            found[name] = str(caught.value)
    with standin.installed() as packages, one_group(rank, world, documents="none") as parallel:
        model = _model(packages, _of_lse)
        shard = parallel.shard(text(), module=model)
        with parallel.active(shard):
            loss = loss_of(model, shard.batch)
            with pytest.raises(RefusedError, match=r"gradient of attention's LSE"):
                loss.backward()
    torch.use_deterministic_algorithms(True)
    return found


def test_calls_that_cannot_be_meant(pool: Pool) -> None:
    for found in pool.run(_refused, world=2):
        for name, message in found.items():
            assert message.startswith("the root module (Model, test_flash_attn_later.py:")
            assert re.search(REFUSALS[name][1], message), message
