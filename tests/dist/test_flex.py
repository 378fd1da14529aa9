"""Models that call flex_attention, on shards and, by dense masks, on one device."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

from lightning_cp import functional
from lightning_cp.errors import MismatchError, RefusedError
from lightning_cp.mask import MaskMod
from tests._harness import hf
from tests._harness.attending import (
    HEADS,
    KV_HEADS,
    LENGTH,
    ROWS,
    SIZE,
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

DOCUMENTS = ((1, 8, 1, 12), (15, 1, 6))
"""Lengths of the documents of each row."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() <= 3


def within(documents: Tensor) -> MaskMod:
    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    return same


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Some queries see nothing."""
    return (q >= k + h) & (q < k + 4 + 3 * h)


class Case(NamedTuple):
    """How the mask is made from the documents of the whole rows, and how attention is called."""

    mod: Callable[[Tensor], MaskMod] | None
    whole: bool = False
    lse: str = ""
    scale: float | None = None


CASES = {
    "none": Case(None, scale=0.3),
    "causal": Case(lambda documents: causal, lse="aux"),
    "window": Case(lambda documents: and_masks(causal, near), whole=True, lse="old"),
    "documents": Case(within),
    "causal documents": Case(lambda documents: and_masks(causal, within(documents))),
    "heads": Case(lambda documents: by_head, lse="aux"),
    "either": Case(lambda documents: or_masks(near, within(documents)), whole=True),
}


class Model(Attending):
    """Calls flex attention; `dense` is torch's attention with a mask of all pairs."""

    def __init__(self, case: Case, *, dense: bool = False) -> None:
        super().__init__()
        self.case, self.dense = case, dense
        self.attend: Any = flex_attention

    def attended(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return self.among(*(x.transpose(1, 2) for x in (q, k, v)), batch).transpose(1, 2)

    def among(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        case, documents = self.case, functional.gather_sequence(batch["documents"])
        mod = None if case.mod is None else case.mod(documents)
        if self.dense:
            return _dense(q, k, v, mod, case)
        size = LENGTH if case.whole else q.shape[2]
        mask = mod and create_block_mask(mod, ROWS, HEADS, size, size, device="cpu")
        options: dict[str, Any] = {"block_mask": mask, "scale": case.scale, "enable_gqa": True}
        if not case.lse:
            found: Tensor = self.attend(q, k, v, **options)
            return found
        aux = {"return_aux": AuxRequest(lse=True)} if case.lse == "aux" else {"return_lse": True}
        out, lse = self.attend(q, k, v, **options, **aux)
        return out * _clean(getattr(lse, "lse", lse))


def _clean(lse: Tensor) -> Tensor:
    return lse.detach().clamp(min=-9).unsqueeze(-1)


def _dense(q: Tensor, k: Tensor, v: Tensor, mod: MaskMod | None, case: Case) -> Tensor:
    size, scale = q.shape[2], case.scale or SIZE**-0.5
    seen = torch.ones(size, size, dtype=torch.bool)
    if mod is not None:
        seen = create_mask(mod, ROWS, HEADS, size, size, device="cpu")
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = (q @ k.mT * scale).masked_fill(~seen, float("-inf"))
    return out * _clean(scores.logsumexp(-1)) if case.lse else out


def _batch() -> Batch:
    numbers = [
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in DOCUMENTS
    ]
    return {**text(), "documents": torch.stack(numbers)}


def _model(case: Case, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(case, **options).double()


OPTIONS = {"sequence_dims": {"documents": 1}}


def _right(rank: int, world: int, layout: str, exchange: str, compiled: bool = False) -> None:
    for name, case in CASES.items():
        expected, model = _model(case, dense=True), _model(case)
        if compiled:
            model.attend = torch.compile(flex_attention, backend="aot_eager")
        reference = loss_of(expected, _batch())
        reference.backward()
        with one_group(rank, world, layout=layout, exchange=exchange, **OPTIONS) as parallel:
            loss = second_step(parallel, model, _batch())
        assert_loss(loss, reference, name)
        assert_gradients(model, expected, world=world, name=name)


@pytest.mark.parametrize(
    ("world", "layout", "exchange"),
    [
        (2, "zigzag", "direct"),
        pytest.param(1, "contiguous", "direct", marks=pytest.mark.full),
        pytest.param(2, "contiguous", "ulysses", marks=pytest.mark.full),
        pytest.param(3, "zigzag", "ring", marks=pytest.mark.full),
        pytest.param(3, "contiguous", "allgather", marks=pytest.mark.full),
    ],
)
def test_masks_on_global_positions(pool: Pool, world: int, layout: str, exchange: str) -> None:
    pool.run(_right, layout, exchange, world=world)


@pytest.mark.full
def test_compiled_calls(pool: Pool) -> None:
    pool.run(_right, "zigzag", "direct", True, world=2)


class Calling(Model):
    """Calls attention as a function says."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__(CASES["none"])
        self.call = call

    def among(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return self.call(q, k, v, batch)


def _masked(make: Callable[[Tensor, Batch], BlockMask]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return flex_attention(q, k, v, block_mask=make(q, batch))

    return call


def _local(q: Tensor, batch: Batch) -> BlockMask:
    mod = and_masks(causal, within(batch["documents"]))
    return create_block_mask(mod, ROWS, HEADS, q.shape[2], q.shape[2], device="cpu")


def _sums(q: Tensor, batch: Batch) -> BlockMask:
    """Reads numbers of which every rank has others."""
    with functional.local():
        edges = batch["documents"].sum(1)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + k) % 2 <= edges[b]

    return create_block_mask(mod, ROWS, HEADS, q.shape[2], q.shape[2], device="cpu")


def _by_hand(q: Tensor, batch: Batch) -> BlockMask:
    count = torch.ones(1, 1, 2, dtype=torch.int32)
    index = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    lengths = (q.shape[2], q.shape[2])
    return BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=6, seq_lengths=lengths)


def _whole_rows(q: Tensor, batch: Batch) -> BlockMask:
    """Looks at more than a pair."""

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k.max()

    return create_block_mask(mod, ROWS, HEADS, q.shape[2], q.shape[2], device="cpu")


def _longer(q: Tensor, batch: Batch) -> BlockMask:
    return create_block_mask(causal, None, None, LENGTH + 1, LENGTH + 1, device="cpu")


def _scored(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, q, k: score + (q - k))


def _largest(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    return flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))[0]


def _of_lse(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    return out * aux.lse.unsqueeze(-1)


def _fewer_heads(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    return flex_attention(q, k[:, :2], v[:, :2])


REFUSALS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "local documents": (
        _masked(_local),
        r"reads tensors of this rank's 11 tokens \(mask_mods\[1\]\.documents \[2, 11\]\).* of 22; "
        r"let it read lightning_cp\.functional\.gather_sequence",
    ),
    "by hand": (_masked(_by_hand), r"blocks of the block mask hide or show other keys"),
    "whole rows": (_masked(_whole_rows), r"let it compare and index element by element"),
    "longer": (_masked(_longer), r"for 23 queries and 23 keys; make it for this rank's 11 and 11"),
    "score_mod": (_scored, r"score_mod of flex_attention .*attend with softcap, alibi_slopes"),
    "largest": (_largest, r"\(max_scores\)"),
    "heads": (_fewer_heads, r"4 query heads and 2 key heads need enable_gqa=True"),
}


def _refused(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, (call, _) in REFUSALS.items():
        with one_group(rank, world, **OPTIONS) as parallel:
            model = Calling(call).double()
            parallel.shard(_batch(), module=model).digest.wait()
            shard = parallel.shard(_batch(), module=model)
            with pytest.raises(RefusedError) as caught, parallel.active(shard):
                model(shard.batch)
            found[name] = str(caught.value)
    return found


def test_calls_that_cannot_be_meant(pool: Pool) -> None:
    for found in pool.run(_refused, world=2):
        for name, message in found.items():
            assert message.startswith("the root module (Calling, test_flex.py:")
            assert re.search(REFUSALS[name][1], message), message


def _later(rank: int, world: int) -> None:
    """What shows when peers compare, and in a backward."""
    with one_group(rank, world, **OPTIONS) as parallel:
        model = Calling(_masked(_sums)).double()
        shard = parallel.shard(_batch(), module=model)
        with (
            pytest.raises(MismatchError, match=r"the mask_mod of attention call 0 reads: rank 0"),
            parallel.active(shard),
        ):
            model(shard.batch)
    with one_group(rank, world, **OPTIONS) as parallel:
        model = Calling(_of_lse).double()
        shard = parallel.shard(_batch(), module=model)
        with parallel.active(shard):
            loss = loss_of(model, shard.batch)
            with pytest.raises(RefusedError, match=r"gradient of attention's LSE"):
                loss.backward()


def test_refusals_of_peers_and_in_a_backward(pool: Pool) -> None:
    pool.run(_later, world=2)


def _transformers(rank: int, world: int) -> None:
    expected, model = (
        hf.build("llama", attn_implementation=name) for name in ("sdpa", "flex_attention")
    )
    model.load_state_dict(expected.state_dict())
    ids = _batch()["input_ids"]

    def of_ids(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())

    reference = of_ids(expected, ids)
    reference.backward()
    with one_group(rank, world) as parallel:
        shard = parallel.shard({"input_ids": ids}, module=model)
        with parallel.active(shard):
            loss = of_ids(model, shard.batch["input_ids"])
            loss.backward()
        parallel.check(shard, loss)
    assert model.config._attn_implementation == "flex_attention"
    assert_loss(loss, reference)
    assert_gradients(model, expected, world=world)


@pytest.mark.full
def test_models_of_transformers_that_name_it(pool: Pool) -> None:
    pytest.importorskip("transformers")
    pool.run(_transformers, world=2)
