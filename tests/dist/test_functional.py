"""The public functions on shards equal plain torch on the whole sequence, gradients included."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import attend, functional
from lightning_cp.api import ContextParallel, Shard
from lightning_cp.config import Config
from lightning_cp.diagnostics.trace import CollectiveRecorder
from tests._harness.grid import rotated
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

BATCH, WIDTH, IGNORED = 2, 3, -100
LENGTHS = (1, 2, 7, 10, 24)
WAYS = [(world, layout) for world in (1, 2, 3) for layout in ("contiguous", "zigzag")]
PLACES = [(length, *way) for length in LENGTHS for way in WAYS]


class Data(NamedTuple):
    """Whole tensors, or one rank's part of them: `[B, S, D]`, and masks and labels `[B, S]`."""

    x: Tensor
    mask: Tensor
    weights: Tensor
    labels: Tensor


def data(length: int) -> Data:
    """Values with many ties; the second row's mask hides everything."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64)
    x[..., 0] = torch.randint(3, (BATCH, length), generator=generator)
    mask = torch.rand(BATCH, length, generator=generator) < 0.6
    mask[1] = False
    weights = torch.rand(BATCH, length, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (BATCH, length), generator=generator)
    return Data(x, mask, weights, labels)


@contextmanager
def parallel(rank: int, world: int, layout: str, **options: Any) -> Iterator[ContextParallel]:
    """Context parallelism over the ranks of the task, removed at the end."""
    found = ContextParallel(
        dist.group.WORLD,
        meta=dist.new_group(backend="gloo"),
        rank=rank,
        world=world,
        config=Config(layout=layout, **options),
    )
    try:
        yield found
    finally:
        found.close()


def cut(
    context: ContextParallel, whole: Data, *, audited: bool = False
) -> tuple[Shard, Data, Tensor]:
    """The shard, its tensors with NaN at the dummies, and which global position each token has.

    Without the audit, which would take a test's references for mistakes.
    """
    batch = {
        "inputs_embeds": whole.x,
        "labels": whole.labels,
        "loss_mask": whole.weights,
        "token_type_ids": whole.mask,
    }
    shard = context.shard(batch)
    if not audited:
        shard.digest.wait()
        shard = context.shard(batch)
    sequence = shard.cut.sequence
    places = sequence.layout.positions(context.rank)
    kept = sequence.real(context.rank)
    part = shard.batch
    x = torch.where(kept[:, None], part["inputs_embeds"], torch.nan)
    weights = torch.where(kept, part["loss_mask"], torch.nan)
    mask = part["token_type_ids"] | ~kept
    return shard, Data(x, mask, weights, part["labels"]), places[kept]


def plain_mean(x: Tensor, weights: Tensor) -> Tensor:
    total = (x * weights[..., None]).sum(1)
    weight = weights.sum(1)[:, None].expand_as(total)
    return torch.where(weight == 0, 0, total / torch.where(weight == 0, 1, weight))


def plain_softmax(x: Tensor, mask: Tensor) -> Tensor:
    hidden = x.masked_fill(~mask[..., None], -math.inf)
    return hidden.softmax(1).nan_to_num(0.0)


class Function(NamedTuple):
    """A function on shards, the same by plain torch on one device; whether its result is cut."""

    ours: Callable[[Data], Tensor]
    plain: Callable[[Data], Tensor]
    sharded: bool = False


FUNCTIONS = {
    "sum": Function(lambda d: functional.sequence_sum(d.x), lambda d: d.x.sum(1)),
    "sum-masked": Function(
        lambda d: functional.sequence_sum(d.x, mask=d.mask, keepdim=True),
        lambda d: (d.x * d.mask[..., None]).sum(1, keepdim=True),
    ),
    "sum-weighted-last-dim": Function(
        lambda d: functional.sequence_sum(d.x[..., 0], dim=-1, mask=d.weights),
        lambda d: (d.x[..., 0] * d.weights).sum(1),
    ),
    "sum-time-major": Function(
        lambda d: functional.sequence_sum(d.x.transpose(0, 1), dim=0), lambda d: d.x.sum(1)
    ),
    "mean": Function(lambda d: functional.sequence_mean(d.x), lambda d: d.x.mean(1)),
    "mean-masked": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.mask, keepdim=True),
        lambda d: plain_mean(d.x, d.mask.double())[:, None],
    ),
    "mean-weighted": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.weights[..., None]),
        lambda d: plain_mean(d.x, d.weights),
    ),
    "mean-of-one-weight-per-token": Function(
        lambda d: functional.sequence_mean(d.x, mask=d.weights[0]),
        lambda d: plain_mean(d.x, d.weights[:1].expand(BATCH, -1)),
    ),
    "max": Function(lambda d: functional.sequence_max(d.x), lambda d: d.x.amax(1)),
    "max-masked": Function(
        lambda d: functional.sequence_max(d.x, mask=d.mask, keepdim=True)[:1],
        lambda d: torch.where(d.mask[..., None], d.x, -math.inf).amax(1, keepdim=True)[:1],
    ),
    "gather": Function(lambda d: functional.gather_sequence(d.x), lambda d: d.x.clone()),
    "cumsum": Function(
        lambda d: functional.cumsum(d.x, dim=1), lambda d: d.x.cumsum(1), sharded=True
    ),
    "cumsum-time-major": Function(
        lambda d: functional.cumsum(d.x.transpose(0, 1), dim=0).transpose(0, 1),
        lambda d: d.x.cumsum(1),
        sharded=True,
    ),
    "softmax": Function(
        lambda d: functional.global_softmax(d.x * 300, dim=1),
        lambda d: (d.x * 300).softmax(1),
        sharded=True,
    ),
    "softmax-three-step": Function(
        lambda d: functional.global_softmax(d.x * 300, dim=1, method="three_step"),
        lambda d: (d.x * 300).softmax(1),
        sharded=True,
    ),
    "softmax-masked": Function(
        lambda d: functional.global_softmax(d.x, dim=1, mask=d.mask),
        lambda d: plain_softmax(d.x, d.mask),
        sharded=True,
    ),
    "softmax-masked-three-step": Function(
        lambda d: functional.global_softmax(d.x, dim=-2, mask=d.mask, method="three_step"),
        lambda d: plain_softmax(d.x, d.mask),
        sharded=True,
    ),
}


def pattern(x: Tensor) -> Tensor:
    """Other weights for every element, so that no mistake cancels out."""
    return torch.arange(1, x.numel() + 1, dtype=x.dtype).cos().view_as(x)


class Expected(NamedTuple):
    """What plain torch finds on one device, and the gradient of its weighed sum."""

    value: Tensor
    weighing: Tensor
    grad: Tensor


def reference(function: Function, whole: Data, factor: float) -> Expected:
    x = whole.x.clone().requires_grad_()
    found = function.plain(whole._replace(x=x))
    value = torch.where(found.isfinite(), found, 0)
    weighing = pattern(value)
    (value * weighing).sum().mul(factor).backward()
    assert x.grad is not None
    return Expected(value.detach(), weighing, x.grad)


def run_functions(rank: int, world: int, layout: str, length: int) -> None:
    """Ranks weigh their losses differently; a rank's gradients come from all ranks' losses."""
    whole = data(length)
    everyone = world * (world + 1) / 2
    references = {
        name: reference(function, whole, 1.0 if function.sharded else everyone)
        for name, function in FUNCTIONS.items()
    }
    with parallel(rank, world, layout) as context:
        shard, part, places = cut(context, whole)
        kept = shard.cut.sequence.real(rank)
        with context.active(shard):
            for name, function in FUNCTIONS.items():
                value, weighing, grad = references[name]
                local = part.x.clone().requires_grad_()
                found = function.ours(part._replace(x=local))
                found = torch.where(found.isfinite(), found, 0)
                if function.sharded:
                    assert not found[:, ~kept].any(), f"{name}: dummies are not 0"
                    found, value = found[:, kept], value[:, places]
                    (found * weighing[:, places]).sum().backward()
                else:
                    ((rank + 1) * (found * weighing).sum()).backward()
                assert_close(found.detach(), value, name)
                assert local.grad is not None
                assert not local.grad[:, ~kept].any(), f"{name}: dummies have a gradient"
                assert_close(local.grad[:, kept], grad[:, places], f"gradient of {name}")


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize(("length", "world", "layout"), PLACES)
def test_values_and_gradients(world: int, layout: str, length: int, pool: Pool) -> None:
    pool.run(run_functions, layout, length, world=world)


def run_integers(rank: int, world: int, layout: str, length: int) -> None:
    """Results that must be equal bit by bit."""
    whole = data(length)
    shifted = torch.cat([whole.labels[:, 1:], torch.full((BATCH, 1), IGNORED)], 1)
    originals = [(x, x.cumsum(1)) for x in (whole.labels, whole.mask, whole.labels.int())]
    numbers = torch.arange(5)
    with parallel(rank, world, layout) as context:
        shard, part, places = cut(context, whole)
        kept = shard.cut.sequence.real(rank)
        with context.active(shard):
            labels = part.labels
            size = labels.shape[1]
            assert torch.equal(functional.positions(size)[kept], places)
            found = functional.shift_labels(labels)
            assert torch.equal(found[:, kept], shifted[:, places])
            assert (found[:, ~kept] == IGNORED).all()
            found = functional.shift_labels(labels.T.int(), dim=0, ignore_index=-1)
            target = shifted.masked_fill(shifted == IGNORED, -1).T.int()
            assert torch.equal(found[kept], target[places])
            for original, cumulated in originals:
                values = part.mask if original.dtype == torch.bool else labels.to(original.dtype)
                assert torch.equal(functional.gather_sequence(values), original)
                scattered = functional.scatter_sequence(original)
                assert torch.equal(scattered[:, kept], values[:, kept])
                assert not scattered[:, ~kept].any()
                assert torch.equal(functional.sequence_sum(values), original.sum(1))
                assert torch.equal(functional.sequence_max(values), original.amax(1))
                running = functional.cumsum(values, dim=1)
                assert torch.equal(running[:, kept], cumulated[:, places])
                right = functional.sequence_mean(values == 1)
                torch.testing.assert_close(right, (original == 1).float().mean(1))
            with functional.local():
                assert torch.equal(functional.gather_sequence(labels), labels)
                assert torch.equal(functional.scatter_sequence(labels), labels)
                assert torch.equal(functional.sequence_sum(labels), labels.sum(1))
                assert torch.equal(functional.positions(5), numbers)


@pytest.mark.parametrize(("length", "world", "layout"), PLACES)
def test_integers(world: int, layout: str, length: int, pool: Pool) -> None:
    pool.run(run_integers, layout, length, world=world)


class Pooling(nn.Module):
    """Uses every differentiable function between layers with parameters, in double.

    Args:
        recompute: compute everything again in the backward.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.recompute = recompute
        self.whole, self.embed, self.mix, self.head, self.score = (
            nn.Linear(WIDTH, n, dtype=torch.float64) for n in (WIDTH, WIDTH, WIDTH, 4, 1)
        )
        self.table = nn.Parameter(torch.randn(30, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, length: int) -> Tensor:
        """`[B, S, D]` of local tokens to `[B, 4]`, equal on all ranks."""
        if self.recompute:
            found: Tensor = checkpoint(self._forward, x, length, use_reentrant=False)
            return found
        return self._forward(x, length)

    def _forward(self, x: Tensor, length: int) -> Tensor:
        # A tensor of the whole sequence, made from parameters on every rank alike.
        table = self.whole(self.table[:length].tanh())
        x = self.embed(x) + functional.scatter_sequence(table, dim=0)
        x = x + functional.cumsum(x, dim=1).tanh()
        q = x[:, None]
        x = x + attend(q, q, q, is_causal=True)[:, 0]
        x = x * functional.global_softmax(self.score(x), dim=1)
        x = x + self.mix(functional.sequence_mean(x, keepdim=True))
        everything = functional.gather_sequence(x).tanh()
        pooled = everything.mean(1) + functional.sequence_max(x) + functional.sequence_sum(x).cos()
        return self.head(pooled)


def loss_of(module: nn.Module, x: Tensor, length: int) -> Tensor:
    return module(x, length).square().sum()


def run_module(rank: int, world: int, layout: str, length: int) -> None:
    whole = data(length)
    plain = Pooling()
    expected = loss_of(plain, whole.x, length)
    expected.backward()
    with parallel(rank, world, layout) as context:
        for recompute in (False, True):
            module = Pooling(recompute)
            shard, _, _ = cut(context, whole, audited=world > 1)
            with context.active(shard):
                loss = loss_of(module, shard.batch["inputs_embeds"], length)
                loss.backward()
            context.check(shard, loss)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
            for (name, ours), theirs in zip(
                module.named_parameters(), plain.parameters(), strict=True
            ):
                assert ours.grad is not None
                dist.all_reduce(ours.grad)
                torch.testing.assert_close(
                    ours.grad / world, theirs.grad, rtol=1e-11, atol=1e-11, msg=name
                )


@pytest.mark.parametrize(("way", "length"), rotated(WAYS, [(length,) for length in LENGTHS]))
def test_mean_of_parameter_gradients(way: tuple[int, str], length: int, pool: Pool) -> None:
    """The rule: the plain mean over ranks is the gradient of one device, recomputed or not."""
    world, layout = way
    pool.run(run_module, layout, length, world=world)


def compiled(x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Everything that must compile without a graph break."""
    places = functional.positions(x.shape[1], device=x.device)
    x = x * (1 + places[:, None]) + functional.sequence_mean(x, mask=mask, keepdim=True)
    x = x + functional.cumsum(x, dim=1) * functional.global_softmax(x, dim=1, mask=mask)
    valid = functional.shift_labels(labels) != IGNORED
    return functional.sequence_sum(x.cos(), mask=valid) + functional.sequence_max(x)


def run_compiled(rank: int, world: int) -> int:
    """One graph per static shape serves with and without a context."""
    torch._dynamo.reset()
    whole = data(12)
    x = whole.x.clone().requires_grad_()
    expected = compiled(x, whole.labels, whole.mask)
    (expected.sum() * world).backward()
    with parallel(rank, world, "zigzag") as context:
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        call = torch.compile(compiled, backend=counter, fullgraph=True, dynamic=False)
        for _ in range(3):
            shard, part, places = cut(context, whole, audited=True)
            local = part.x.clone().requires_grad_()
            with context.active(shard):
                found = call(local, part.labels, part.mask)
                found.sum().backward()
            torch.testing.assert_close(found, expected)
            assert local.grad is not None
            assert x.grad is not None
            torch.testing.assert_close(local.grad, x.grad[:, places])
            alone = call(part.x, part.labels, part.mask)
            torch.testing.assert_close(alone, compiled(part.x, part.labels, part.mask))
    torch._dynamo.reset()
    return counter.frame_count


def test_compiled_without_graph_break(pool: Pool) -> None:
    assert pool.run(run_compiled, world=2, timeout=110) == [1 + 1] * 2, "with and without gradients"


def run_gather_compiled(rank: int, world: int) -> None:
    def model(x: Tensor) -> Tensor:
        return functional.scatter_sequence(functional.gather_sequence(x.sin()).cos()) * 2

    whole = data(13).x
    with parallel(rank, world, "zigzag") as context:
        shard = context.shard({"inputs_embeds": whole})
        local = shard.batch["inputs_embeds"].requires_grad_()
        with context.active(shard):
            found = torch.compile(model, backend="aot_eager")(local)
            found.sum().backward()
    torch.testing.assert_close(found, local.sin().cos() * 2)
    torch.testing.assert_close(local.grad, -local.sin().sin() * local.cos() * 2)
    torch._dynamo.reset()


def test_gather_and_scatter_may_break_the_graph(pool: Pool) -> None:
    pool.run(run_gather_compiled, world=2, timeout=110)


def run_halves(rank: int, world: int, dtype: torch.dtype) -> None:
    """Sums of many: a running sum in half precision would stall at 256 or 2048."""
    count = 6000
    batch = {"inputs_embeds": torch.ones(1, count, 1, dtype=dtype)}
    with parallel(rank, world, "zigzag") as context:
        shard = context.shard(batch)
        x = shard.batch["inputs_embeds"].requires_grad_()
        with context.active(shard):
            results = {
                "sum": (functional.sequence_sum(x), float(count)),
                "mean": (functional.sequence_mean(x), 1.0),
                "max": (functional.sequence_max(x), 1.0),
                "last": (functional.gather_sequence(functional.cumsum(x, dim=1))[:, -1], count),
                "softmax": (functional.sequence_sum(functional.global_softmax(x, dim=1)), 1.0),
            }
            for name, (found, expected) in results.items():
                assert found.dtype == dtype, name
                assert found.item() == pytest.approx(expected, rel=1e-2), name
            results["sum"][0].sum().backward()
            results["max"][0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    each = torch.full_like(x, world * (1 + 1 / count))
    torch.testing.assert_close(x.grad, each, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float(dtype: torch.dtype, pool: Pool) -> None:
    pool.run(run_halves, dtype, world=2)


def run_extremes(rank: int, world: int) -> None:
    """Scores at both ends of the range, -inf on whole ranks, and NaN."""
    whole = torch.zeros(3, 8, dtype=torch.float64)
    whole[0] = torch.tensor([-1e300, 1e300] * 4, dtype=torch.float64)
    whole[1, :4] = -math.inf
    whole[2] = -math.inf
    with parallel(rank, world, "contiguous") as context:
        shard = context.shard({"labels": whole})
        with context.active(shard):
            for method in ("packed", "three_step"):
                x = shard.batch["labels"].clone().requires_grad_()
                found = functional.global_softmax(x, method=method)
                found.square().sum().backward()
                expected = whole.softmax(-1).nan_to_num(0.0)
                part = shard.cut.sequence.layout.shard(expected, rank=rank, dim=1)
                assert_close(found, part, method)
                assert x.grad is not None
                assert x.grad.isfinite().all(), method
                assert not x.grad[2].any(), method
            x = shard.batch["labels"].clone()
            if rank == 0:
                x[0, 0] = math.nan
            found = functional.sequence_max(x)
            assert found[0].isnan()
            assert found[1:].tolist() == [0.0, -math.inf]


def test_extreme_scores(pool: Pool) -> None:
    pool.run(run_extremes, world=2)
    pool.run(run_extremes, world=3)


def run_traffic(rank: int, world: int) -> None:
    """What travels: sums of one number per span or row, never a whole sequence but in a gather."""
    with parallel(rank, world, "zigzag") as context:
        shard, _, _ = cut(context, data(24))
        x = shard.batch["inputs_embeds"]
        row = BATCH * WIDTH * 8
        spans = sum(len(spans) for spans in shard.cut.sequence.layout.spans)
        calls = {
            "sequence_sum": (lambda: functional.sequence_sum(x), {"allreduce_": row + 8}),
            "sequence_mean": (
                lambda: functional.sequence_mean(x, mask=x),
                {"allreduce_": 2 * row},
            ),
            "sequence_max": (lambda: functional.sequence_max(x), {"allreduce_": 2 * row}),
            "cumsum": (lambda: functional.cumsum(x, dim=1), {"allreduce_": spans * row}),
            "packed": (lambda: functional.global_softmax(x, dim=1), {"send": 2 * row}),
            "three_step": (
                lambda: functional.global_softmax(x, dim=1, method="three_step"),
                {"allreduce_": 3 * row},
            ),
            "gather": (lambda: functional.gather_sequence(x), {"send": 12 * row}),
        }
        with context.active(shard):
            for name, (call, expected) in calls.items():
                with CollectiveRecorder() as recorder:
                    call()
                for kind, size in expected.items():
                    assert recorder.total(kind) == size, f"{name}: {recorder.calls}"


def test_what_travels(pool: Pool) -> None:
    pool.run(run_traffic, world=2)


def run_refused(rank: int, world: int) -> list[str]:
    whole = data(10)
    found = []
    with parallel(rank, world, "contiguous") as context:
        shard = context.shard({"inputs_embeds": whole.x})
        short = shard.batch["inputs_embeds"][:, :3]
        with context.active(shard):
            for call in (
                lambda: functional.positions(3),
                lambda: functional.shift_labels(short[..., 0].long()),
                lambda: functional.sequence_sum(short),
                lambda: functional.sequence_mean(short),
                lambda: functional.sequence_max(short),
                lambda: functional.gather_sequence(short),
                lambda: functional.scatter_sequence(short),
                lambda: functional.cumsum(short, dim=1),
                lambda: functional.global_softmax(short, dim=1),
            ):
                try:
                    call()
                except functional.RefusedError as error:
                    found.append(str(error))
    return found


def test_sizes_that_are_nobodys_share_are_refused(pool: Pool) -> None:
    for found in pool.run(run_refused, world=2):
        assert len(found) == 9
        for message in found:
            assert message.startswith("3 tokens are no declared sequence's ")
            assert "functional.local()" in message


def run_shifted_loss(rank: int, world: int) -> None:
    """Labels shifted inside the step, with the function in place of slicing."""
    whole = data(11)
    torch.manual_seed(5)
    head = nn.Linear(WIDTH, 5, dtype=torch.float64)
    logits = head(whole.x)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), whole.labels[:, 1:].flatten())
    expected.backward()
    plain = head.weight.grad
    head.weight.grad = None
    with parallel(rank, world, "zigzag") as context:
        shard, _, _ = cut(context, whole)
        with context.active(shard):
            labels = functional.shift_labels(shard.batch["labels"])
            logits = head(shard.batch["inputs_embeds"])
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
    torch.testing.assert_close(loss, expected)
    assert head.weight.grad is not None
    dist.all_reduce(head.weight.grad)
    torch.testing.assert_close(head.weight.grad / world, plain)


@pytest.mark.parametrize("world", [2, 3])
def test_labels_shifted_in_the_step(world: int, pool: Pool) -> None:
    pool.run(run_shifted_loss, world=world)
