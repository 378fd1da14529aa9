"""The public functions inside modules: gradients of parameters, compiled code, shifted labels."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import attend, functional
from tests._harness.grid import rotated
from tests._harness.group import one_group
from tests._harness.pool import Pool
from tests._harness.shards import IGNORED, LENGTHS, WAYS, WIDTH, cut, data

pytestmark = pytest.mark.dist


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
    with one_group(rank, world, layout=layout) as context:
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
    with one_group(rank, world, layout="zigzag") as context:
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
    with one_group(rank, world, layout="zigzag") as context:
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
    with one_group(rank, world, layout="zigzag") as context:
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
