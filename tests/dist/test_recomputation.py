"""Layers that are recomputed in the backward, with and without their attention."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import checkpoint_policy
from lightning_cp.api import ContextParallel, Shard
from lightning_cp.diagnostics.trace import CollectiveCall, CollectiveRecorder
from lightning_cp.recomputation import described
from tests._harness import flash_attn
from tests._harness.group import one_group
from tests._harness.hf import build
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist

WIDTH, HEADS, LAYERS = 8, 2, 2
Batch = dict[str, Tensor]
Calling = Callable[..., Any] | None
"""How a layer is called: directly where None."""

CALLS: dict[str, Calling] = {
    "direct": None,
    "recomputed": lambda f, *args: checkpoint(f, *args, use_reentrant=False),
    "reentrant": lambda f, *args: checkpoint(f, *args, use_reentrant=True),
    "kept": lambda f, *args: checkpoint(
        f, *args, use_reentrant=False, context_fn=checkpoint_policy()
    ),
}


def by_sdpa(layer: "Layer", x: Tensor) -> Tensor:
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=layer.dropout, is_causal=True)
    return found.transpose(1, 2).flatten(2)


def by_mha(layer: "Layer", x: Tensor) -> Tensor:
    size = x.shape[1]
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    found: Tensor = layer.mha(x, x, x, need_weights=False, attn_mask=later, is_causal=True)[0]
    return found


def by_flash_attn(layer: "Layer", x: Tensor) -> Tensor:
    from flash_attn import flash_attn_qkvpacked_func

    qkv = layer.qkv(x).unflatten(-1, (3, HEADS, -1))
    found: Tensor = flash_attn_qkvpacked_func(qkv, layer.dropout, causal=True).flatten(2)
    return found


KINDS: dict[str, Callable[["Layer", Tensor], Tensor]] = {
    "sdpa": by_sdpa,
    "mha": by_mha,
    "flash_attn": by_flash_attn,
}


class Layer(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.attend, self.dropout = KINDS[kind], dropout
        self.qkv, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.attend(self, x)).tanh()
        return found


class Model(nn.Module):
    def __init__(self, kind: str, calling: Calling, dropout: float = 0.0) -> None:
        super().__init__()
        self.calling = calling or (lambda f, *args: f(*args))
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.layers = nn.ModuleList(Layer(kind, dropout) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.calling(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _own(kind: str, how: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind, CALLS[how], dropout).double()


def _hugging_face(how: str, dropout: float = 0.0) -> nn.Module:
    model: Any = build("llama", attention_dropout=dropout)
    if how != "direct":
        options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
        if how == "kept":
            options["context_fn"] = checkpoint_policy()
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(options)
    found: nn.Module = model
    return found


def made(kind: str, how: str, dropout: float = 0.0) -> nn.Module:
    """A model with the same parameters every time."""
    return _hugging_face(how, dropout) if kind == "llama" else _own(kind, how, dropout)


def _batch(length: int, documents: bool = False) -> Batch:
    drawn = torch.randint(20, (2, length + 1), generator=torch.Generator().manual_seed(length))
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    if documents:
        first = length // 3
        places = torch.cat([torch.arange(first), torch.arange(length - first)])
        batch["position_ids"] = places.expand(2, -1)
    return batch


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    found = model(**batch)
    return found if isinstance(found, Tensor) else found.loss


OUTSIDE = {"llama": 2}
"""Messages of a forward outside its layers: the labels, which the model shifts."""


class Step(NamedTuple):
    """Attention calls, and calls of the exchange, in a forward and in a backward."""

    loss: float
    grads: list[Tensor]
    attention: tuple[int, int]
    exchange: tuple[int, int]


def _step(parallel: ContextParallel, model: nn.Module, shard: Shard) -> Step:
    log = shard.context.log
    with parallel.active(shard), CollectiveRecorder() as recorder:
        loss = loss_of(model, shard.batch)
        attention, calls = log.attention, len(recorder.calls)
        loss.backward()
    parallel.check(shard, loss)
    return Step(
        loss.item(),
        [p.grad for p in model.parameters() if p.grad is not None],
        (attention, log.attention - attention),
        (_exchanged(recorder.calls[:calls]), _exchanged(recorder.calls[calls:])),
    )


def _exchanged(calls: list[CollectiveCall]) -> int:
    """How many of the calls are no sums, of which losses are made."""
    return sum(not call.name.startswith("allreduce") for call in calls)


def _counted(rank: int, world: int, kind: str) -> dict[str, Step]:
    """A step with each way to call layers, after two that are watched more closely."""
    found = {}
    with flash_attn.installed(), one_group(rank, world) as parallel:
        for how in CALLS:
            model = made(kind, how)
            for _ in range(3):
                model.zero_grad()
                shard = parallel.shard(_batch(11), module=model)
                found[how] = _step(parallel, model, shard)
    return found


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_what_is_repeated(pool: Pool, kind: str) -> None:
    for found in pool.run(_counted, kind, world=2):
        direct = found["direct"]
        assert direct.attention == (LAYERS, 0)
        assert [found[how].attention for how in ("recomputed", "reentrant", "kept")] == [
            (LAYERS, LAYERS),
            (LAYERS, LAYERS),
            (LAYERS, 0),
        ]
        assert found["kept"].exchange == direct.exchange
        if kind != "flash_attn":  # the recorder does not look into that package's operators
            forward, backward = direct.exchange
            layers = forward - OUTSIDE.get(kind, 0)
            assert layers > 0
            for how in ("recomputed", "reentrant"):
                assert found[how].exchange == (forward, backward + layers), how
        for how, step in found.items():
            assert step.loss == direct.loss, how
            for one, other in zip(step.grads, direct.grads, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-13, msg=how)


def _dropping(rank: int, world: int, kind: str) -> dict[str, Step]:
    """A step with each way to call layers that drop weights, from the same seed."""
    found = {}
    options = {"attention_dropout": "tile", "attention_backend": "reference"}
    with flash_attn.installed(), one_group(rank, world, **options) as parallel:
        for how in ("none", *CALLS):
            model = made(kind, "direct") if how == "none" else made(kind, how, dropout=0.4)
            shard = parallel.shard(_batch(11), module=model)
            torch.manual_seed(5)
            found[how] = _step(parallel, model, shard)
    return found


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_the_same_weights_are_dropped_again(pool: Pool, kind: str) -> None:
    for found in pool.run(_dropping, kind, world=2):
        direct = found["direct"]
        assert abs(direct.loss - found.pop("none").loss) > 1e-4
        for how, step in found.items():
            assert step.loss == direct.loss, how
            for one, other in zip(step.grads, direct.grads, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-13, msg=how)


def _in_flight(rank: int, world: int, joint: bool) -> None:
    """Two packed micro-batches, both forwards before any backward."""
    lengths = (9, 14)
    expected, model = _own("sdpa", "direct"), _own("sdpa", "kept")
    with one_group(rank, world, documents="position_ids") as parallel:
        logs = []
        for length in lengths:
            shard = parallel.shard(_batch(length, documents=True), module=expected)
            with parallel.active(shard):
                loss_of(expected, shard.batch).backward()
        losses = []
        for length in lengths:
            shard = parallel.shard(_batch(length, documents=True), module=model)
            with parallel.active(shard):
                losses.append(loss_of(model, shard.batch))
            logs.append(shard.context.log)
        for loss in [losses[0] + losses[1]] if joint else losses:
            loss.backward()
    assert [log.attention for log in logs] == [LAYERS] * 2
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("joint", [False, True], ids=["separate", "sum"])
def test_kept_attention_of_two_batches(pool: Pool, joint: bool) -> None:
    pool.run(_in_flight, joint, world=2)


def test_what_the_start_table_says() -> None:
    assert "unless checkpoint_policy() is used" in described(None)
    assert described(_hugging_face("direct")) == described(None)
    repeated = described(_hugging_face("recomputed"))
    assert "with the exchange of attention repeated in" in repeated
    assert "context_fn=lightning_cp.checkpoint_policy() keeps it" in repeated
    assert described(_hugging_face("kept")).endswith("with their attention kept")
