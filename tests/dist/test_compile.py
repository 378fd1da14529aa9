"""Compiled code, recomputation and threads under a context."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lightning_cp.api import ContextParallel, Shard
from lightning_cp.attention import attend
from lightning_cp.layout import contiguous
from tests._harness.group import one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist


class Attention(nn.Module):
    """One attention layer with a residual."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Embedding, attention blocks, head; optionally recomputed in the backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def _model(recompute: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(recompute).double()


def _batch(length: int, rows: int = 2) -> dict[str, Tensor]:
    drawn = torch.randint(20, (rows, length + 1), generator=torch.Generator().manual_seed(length))
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _gradients(model: nn.Module, world: int = 1) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        if world > 1:
            dist.all_reduce(parameter.grad)
        found.append(parameter.grad / world)
    model.zero_grad()
    return found


def _reference(*lengths: int) -> list[tuple[float, list[Tensor]]]:
    found = []
    for length in lengths:
        model = _model()
        loss = _loss(model, _batch(length))
        loss.backward()
        found.append((loss.item(), _gradients(model)))
    return found


def _run(parallel: ContextParallel, model: nn.Module, length: int) -> tuple[float, Shard]:
    shard = parallel.shard(_batch(length), module=model)
    with parallel.active(shard):
        loss = _loss(model, shard.batch)
        loss.backward()
    parallel.check(shard, loss)
    return loss.item(), shard


def _assert_same(
    got: tuple[float, list[Tensor]], expected: tuple[float, list[Tensor]], where: object
) -> None:
    assert got[0] == pytest.approx(expected[0], abs=1e-12), where
    for ours, theirs in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=str(where))


def _compiled_before(rank: int, world: int) -> int:
    """Plain, then under contexts of changing lengths, then installed but idle, then closed."""
    lengths = (9, 12, 31, 10, 9)
    expected = _reference(*lengths)
    model = _model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    plain = _loss(model, _batch(9))
    plain.backward()
    _assert_same((plain.item(), _gradients(model)), expected[0], "compiled before")
    compiled = counter.frame_count
    with one_group(rank, world) as parallel:
        for length, reference in zip(lengths, expected, strict=True):
            loss, shard = _run(parallel, model, length)
            assert shard.context.log.attention == 2, length
            _assert_same((loss, _gradients(model, world)), reference, length)
        recompiled = counter.frame_count - compiled
        idle = _loss(model, _batch(12))
        idle.backward()
        _assert_same((idle.item(), _gradients(model)), expected[1], "idle")
    closed = _loss(model, _batch(12))
    closed.backward()
    _assert_same((closed.item(), _gradients(model)), expected[1], "closed")
    return recompiled


def test_compiled_before_activation(pool: Pool) -> None:
    recompiled = pool.run(_compiled_before, world=2, timeout=110)
    assert max(recompiled) <= 4, "one static and one dynamic graph per block"


def _call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _job(rank: int, world: int, cache: str, context: bool) -> int:
    """One job on a compile cache: attention forward and backward; returns the cache hits."""
    whole = [torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    expected = [x.clone().requires_grad_() for x in whole]
    output = _call(*expected)
    output.backward(whole[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{cache}/{rank}")
        counters.clear()
        compiled = torch.compile(_call, fullgraph=True)
        local = [x.clone().requires_grad_() for x in whole]
        if not context:
            found = compiled(*local)
            found.backward(whole[0])
        else:
            layout = contiguous(12, world)
            local = [layout.shard(x, rank=rank, dim=2).requires_grad_() for x in whole]
            with one_group(rank, world, layout="contiguous") as parallel:
                shard = parallel.shard(_batch(12, rows=1))
                with parallel.active(shard):
                    found = compiled(*local)
                    found.backward(layout.shard(whole[0], rank=rank, dim=2))
            assert shard.context.log.attention == 1
            output = layout.shard(output, rank=rank, dim=2)
            expected = [layout.shard(x.grad, rank=rank, dim=2) for x in expected]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
    torch.testing.assert_close(found, output)
    for ours, theirs in zip(local, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs if context else theirs.grad)
    return hits


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(False, id="plain then cp"),
        pytest.param(True, id="cp then plain"),
    ],
)
@pytest.mark.full
@pytest.mark.timeout(240)
def test_jobs_share_a_compile_cache(pool: Pool, tmp_path: Path, first: bool) -> None:
    """The third job shows that the cache is in use: it finds the graph of the first."""
    for context, hit in ((first, False), (not first, False), (first, True)):
        found = pool.run(_job, str(tmp_path), context, world=2, timeout=110)
        assert [hits > 0 for hits in found] == [hit] * 2
        pool.close()  # the next job has processes of its own


def _backward_elsewhere(rank: int, world: int, outside: bool) -> None:
    """Recomputation in a backward that runs in another thread, inside or after the context."""
    ((expected, gradients),) = _reference(11)
    model = _model(recompute=True)
    with one_group(rank, world) as parallel:
        shard = parallel.shard(_batch(11), module=model)
        with parallel.active(shard):
            loss = _loss(model, shard.batch)
            if not outside:
                _in_thread(loss.backward)
        if outside:
            _in_thread(loss.backward)
    assert shard.context.log.attention == 4, "two forwards, two recomputations"
    _assert_same((loss.item(), _gradients(model, world)), (expected, gradients), outside)


def _in_thread(call: Any) -> None:
    failed: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "after the context"])
@pytest.mark.parametrize("world", [2, 3])
def test_backward_in_a_second_thread_with_checkpointing(
    pool: Pool, world: int, outside: bool
) -> None:
    pool.run(_backward_elsewhere, outside, world=world)


def _two_in_flight(rank: int, world: int, joint: bool) -> None:
    """Two micro-batches of different lengths, both forwards before any backward."""
    lengths = (9, 14)
    model = _model(recompute=True)
    expected = [torch.zeros(())] * len(list(model.parameters()))
    for _, gradients in _reference(*lengths):
        expected = [a + b for a, b in zip(expected, gradients, strict=True)]
    with one_group(rank, world) as parallel:
        losses = []
        for length in lengths:
            shard = parallel.shard(_batch(length), module=model)
            with parallel.active(shard):
                losses.append(_loss(model, shard.batch))
        if joint:
            (losses[0] + losses[1]).backward()
        else:
            for loss in losses:
                loss.backward()
    _assert_same((0.0, _gradients(model, world)), (0.0, expected), joint)


@pytest.mark.parametrize("joint", [False, True], ids=["separate", "sum"])
def test_recomputation_takes_the_plan_of_its_own_forward(pool: Pool, joint: bool) -> None:
    pool.run(_two_in_flight, joint, world=2)


def _operator_checks(rank: int, world: int) -> None:
    q, k, v = (torch.randn(1, heads, 5, 4, requires_grad=True) for heads in (4, 2, 2))
    torch.library.opcheck(
        torch.ops.lightning_cp.attention.default,
        (q, k, v, True, 0.5),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    losses = torch.rand(6, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lightning_cp.token_sums.default,
        (losses, torch.ones(6)),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    out = attend(q, k, v, is_causal=True)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, plain)


def test_operators_keep_their_contracts(pool: Pool) -> None:
    pool.run(_operator_checks, world=1)
