"""Dropout of attention weights in swapped calls: how much, which, and that gradients follow it."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cp.config import Config
from lightning_cp.context import SLOT, Context, Served
from lightning_cp.errors import ConfigError, ContextParallelWarning, RefusedError
from lightning_cp.plan import Replicated
from lightning_cp.swap.dropped import kept_dropout
from tests._harness import flash_attn, hf
from tests._harness.group import grads_of, one_group
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

ROWS, HEADS, LENGTH, SIZE = 2, 4, 24, 5
P = 0.3
SHAPE = (ROWS, HEADS, LENGTH, LENGTH)
HIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def inputs() -> tuple[Tensor, ...]:
    """q, k, v that shows the weights, and the gradient of the output; `[B, H, S, D]`."""
    generator = torch.Generator().manual_seed(3)
    q, k = (
        torch.randn(*SHAPE[:3], SIZE, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    grad = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return q, k, torch.eye(LENGTH, dtype=torch.float64).expand(SHAPE).clone(), grad


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, P, causal)


def by_flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn import flash_attn_func

    q, k = (F.pad(x, (0, LENGTH - SIZE)) for x in (q, k))  # that package takes one size
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn_func(*rows, dropout_p=P, softmax_scale=SIZE**-0.5, causal=causal)
    return out.transpose(1, 2)


def compiled_by(backend: str) -> Callable[..., Tensor]:
    return lambda *args: torch.compile(by_sdpa, backend=backend, fullgraph=True)(*args)


CALLS: dict[str, Callable[..., Tensor]] = {
    "sdpa": by_sdpa,
    "flash_attn": by_flash_attn,
    "aot_eager": compiled_by("aot_eager"),
    "inductor": compiled_by("inductor"),
}


def drawn(
    rank: int, world: int, kind: str, causal: bool, exchange: str, seeds: tuple[int, ...]
) -> list[list[Tensor]]:
    """For every seed two calls: whole rows of output, dq, dk and dv."""
    found = []
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    options: Any = {"exchange": exchange, "layout": "zigzag", "attention_dropout": "tile"}
    with flash_attn.installed(), one_group(rank, world, **options) as parallel:
        for seed in seeds:
            shard = parallel.shard(batch)
            layout = shard.cut.sequence.layout
            *parts, grad = (layout.shard(x, rank=rank, dim=2) for x in inputs())
            leaves = [x.requires_grad_() for x in parts]
            torch.manual_seed(seed)
            with parallel.active(shard):
                for _ in range(2):
                    out = CALLS[kind](*leaves, causal)
                    results = (out, *torch.autograd.grad(out, leaves, grad))
                    found.append([parallel.unshard(x, shard, dim=2) for x in results])
    return found if rank == 0 else []


@pytest.mark.parametrize(
    ("kind", "world", "causal", "exchange"),
    [
        ("sdpa", 2, True, "ring"),
        ("sdpa", 3, False, "direct"),
        ("sdpa", 2, False, "ulysses"),
        ("sdpa", 3, True, "allgather"),
        ("flash_attn", 2, True, "direct"),
        ("flash_attn", 3, False, "ring"),
        pytest.param("aot_eager", 2, True, "direct", marks=pytest.mark.full),
        pytest.param("inductor", 3, False, "ring", marks=pytest.mark.full),
    ],
)
def test_gradients_are_those_of_the_weights_that_were_kept(
    kind: str, world: int, causal: bool, exchange: str, pool: Pool
) -> None:
    first, second, *_ = pool.run(drawn, kind, causal, exchange, (5,), world=world)[0]
    q, k, v, grad = (x.requires_grad_() for x in inputs())
    seen = ~HIDDEN if causal else torch.ones_like(HIDDEN)
    masks = []
    for out, *grads in (first, second):
        kept = (out > 0)[..., seen]
        masks.append(kept)
        spread = (P * (1 - P) / kept.numel()) ** 0.5
        assert abs(kept.double().mean().item() - (1 - P)) < 4 * spread
        scores = q @ k.mT * SIZE**-0.5
        weights = (scores.masked_fill(HIDDEN, float("-inf")) if causal else scores).softmax(-1)
        scaled = weights * (out > 0) / (1 - P)
        torch.testing.assert_close(out, scaled)
        expected = torch.autograd.grad(scaled @ v, (q, k, v), grad)
        torch.testing.assert_close(grads, list(expected))
    agreement = (masks[0] == masks[1]).double().mean().item()
    assert agreement == pytest.approx(P**2 + (1 - P) ** 2, abs=0.05)


def test_ranks_rows_and_heads_drop_independently_and_a_seed_repeats_it(pool: Pool) -> None:
    first, second, again, *_ = pool.run(drawn, "sdpa", False, "direct", (5, 5), world=2)[0]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])
    rows = (first[0] > 0).flatten(0, 2).tolist()
    assert len(set(map(tuple, rows))) == len(rows) == ROWS * HEADS * LENGTH


def hugging_face(**options: Any) -> nn.Module:
    return hf.build("llama", **options)


class Multihead(nn.Module):
    def __init__(self, attention_dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(hf.VOCABULARY, 8)
        self.mha = nn.MultiheadAttention(8, 2, attention_dropout, batch_first=True)
        self.double()

    def forward(self, input_ids: Tensor, **_: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        return {"logits": self.mha(x, x, x)[0]}


MODELS: dict[str, Callable[..., nn.Module]] = {"mha": Multihead, "llama": hugging_face}


def outputs(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    """Rows of outputs with each choice, in training and in evaluation."""
    found = {}
    batch = {"input_ids": hf.tokens()}
    for choice, p in (("tile", 0.5), ("again", 0.5), ("off", 0.5), ("none", 0.0)):
        model = MODELS[kind](attention_dropout=p)
        option: Any = {"attention_dropout": {"off": "off"}.get(choice, "tile")}
        with one_group(rank, world, **option) as parallel:
            for train in (True, False):
                shard = parallel.shard(batch, module=model)
                torch.manual_seed(4)
                with parallel.active(shard):
                    out = model.train(train)(**shard.batch)["logits"]
                    out.sum().backward()
                found[f"{choice} {train}"] = parallel.unshard(out, shard)
        assert grads_of(model)
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_modules_drop_in_training_alone(kind: str, pool: Pool) -> None:
    found = pool.run(outputs, kind, world=2)[0]
    plain = found["none True"]
    assert torch.equal(found["tile True"], found["again True"])
    assert not torch.allclose(found["tile True"], plain, atol=1e-3)
    for name in ("off True", "tile False", "off False", "none False"):
        torch.testing.assert_close(found[name], plain, rtol=0, atol=1e-13, msg=name)


def warned(rank: int, world: int) -> tuple[list[str], list[Served]]:
    """Warnings of three steps, and which kernels computed the last."""
    batch = {"input_ids": hf.tokens()}
    with (
        one_group(rank, world, attention_dropout="tile") as parallel,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = Multihead(0.5)
        for _ in range(3):
            shard = parallel.shard(batch, module=model)
            with parallel.active(shard):
                model(**shard.batch)
            parallel.check(shard, None)
    said = [str(x.message) for x in caught if x.category is ContextParallelWarning]
    return said, list(shard.context.log.kernels)


def test_the_slow_reference_is_warned_of_once(pool: Pool) -> None:
    first, *others = pool.run(warned, world=2)
    (message,) = first[0]
    assert "reference, which is slow, for calls with dropout: the sdpa kernel computes" in message
    assert "attention_backend='reference' if that is fine" in message
    assert all(said == [] for said, _ in others)
    for _, kinds in (first, *others):
        assert [(x.kernel, x.terms, x.dims) for x in kinds] == [("reference", ("dropout",), (4, 4))]
        assert kinds[0].passed[0] == "the sdpa kernel computes no dropout"


def compiled_model(rank: int, world: int, recomputed: bool) -> None:
    """What is compiled drops what eager code does; with another option the graph refuses to run."""
    batch = {"input_ids": hf.tokens()}
    eager, model = (MODELS["llama"](attention_dropout=P) for _ in range(2))
    if recomputed:
        for each in (eager, model):
            enable: Any = getattr(each, "activation_checkpointing_enable", None)
            (enable or each.gradient_checkpointing_enable)({"use_reentrant": False})
    layer: Any = torch.compile(by_sdpa, backend="aot_eager", fullgraph=True)
    with one_group(rank, world, attention_dropout="tile") as parallel:
        model.compile(backend="aot_eager", fullgraph=True)
        for each in (eager, model):
            shard = parallel.shard(batch, module=each)
            torch.manual_seed(4)
            with parallel.active(shard):
                each(**shard.batch)["logits"].sum().backward()
        for one, other in zip(grads_of(eager).values(), grads_of(model).values(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
        local = torch.zeros(ROWS, HEADS, shard.batch["input_ids"].shape[1], SIZE)
        with parallel.active(shard):
            layer(local, local, local, True)
        anew: Any = torch.compile(by_sdpa, backend="aot_eager", fullgraph=True, dynamic=True)
        other_option = replace(shard.context, dropout="off")
        with SLOT.activate(other_option), pytest.raises(RefusedError, match="runs with 'off'"):
            layer(local, local, local, True)
        with SLOT.activate(other_option), pytest.raises(Exception, match="dropout='tile'"):
            anew(local, local, local, False)


@pytest.mark.full
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_models_drop_the_same_weights(recomputed: bool, pool: Pool) -> None:
    pool.run(compiled_model, recomputed, world=2)


def replicated(rank: int, world: int) -> None:
    q, k, v, _ = (x[:, :, : LENGTH // world] for x in inputs())
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    options: Any = {"exchange": Replicated(), "attention_dropout": "tile"}
    with one_group(rank, world, **options) as parallel, parallel.active(parallel.shard(batch)):
        by_sdpa(q, k, v, False)


def test_replicated_attention_refuses(pool: Pool) -> None:
    for failure in pool.failures(replicated, world=2):
        assert failure.kind == "RefusedError"
        assert "attention without dropout" in failure.message


def weights_of_flash_attn(rank: int, world: int) -> None:
    rows = torch.zeros(ROWS, LENGTH // world, HEADS, 8)
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    call = (P, 1.0, False, -1, -1, 0.0, None)
    with flash_attn.installed(), one_group(rank, world, attention_dropout="off") as parallel:
        shard = parallel.shard(batch)
        with parallel.active(shard):
            torch.ops.flash_attn._flash_attn_forward(*[rows] * 3, *call, return_softmax=True)


def test_weights_of_flash_attn_are_refused(pool: Pool) -> None:
    for failure in pool.failures(weights_of_flash_attn, world=2):
        assert failure.kind == "RefusedError"
        assert "return_attn_probs=True with dropout" in failure.message


def test_what_an_option_makes_of_a_call() -> None:
    nothing: Any = None
    context = Context(
        rank=0, world=2, group=nothing, meta=nothing, sequences={}, exchange="ring", dropout="tile"
    )
    assert kept_dropout(context, 0.2) == 0.2
    assert kept_dropout(context, 0.0) == 0.0
    with pytest.raises(ConfigError, match=r"attention_dropout='on'.*refuse, tile, off"):
        Config(attention_dropout="on")
    context = Context(rank=0, world=2, group=nothing, meta=nothing, sequences={}, exchange="ring")
    with pytest.raises(RefusedError, match=r"dropout of 0.2.*attention_dropout='tile'"):
        kept_dropout(context, 0.2)
