"""Random numbers: alike on peers, but for what belongs to tokens; repeated in recomputation."""

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_cp.context import SLOT
from lightning_cp.swap.random import SHARED, whose
from tests._harness.group import one_group
from tests._harness.models import Case, LanguageModel, Text, trainer_of

pytestmark = pytest.mark.dist

LENGTH, ROWS, WIDTH = 23, 2, 16


class Draws(LanguageModel):
    """Draws per sample and per token, drops tokens and pooled features, in every step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        tokens, labels, ids, *rest = self.fields(batch)
        x = self.net.tokens(tokens)
        dropped = F.dropout(torch.ones_like(x), 0.5)
        rows = len(ids)
        self.seen.append(
            {
                "tokens": dropped[..., 0].tolist(),
                "pooled": F.dropout(torch.ones(rows, 20), 0.5, training=True).tolist(),
                "per row": torch.rand(rows).tolist(),
                "per row in place": torch.empty(rows, 1).uniform_().tolist(),
                "steps": torch.randint(1000, (rows,)).tolist(),
                "python": random.random(),
                "numpy": float(np.random.rand()),
            }
        )
        self.ids += ids.tolist()
        logits = self.net(tokens, *rest) * F.dropout(torch.ones(rows, 1, 1), 0.1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def draw(rank: int, world: int, epochs: int, seed: int | None, **more: Any) -> tuple[Any, Any]:
    """Train with a shuffling loader that uses the default generator; a task of the pool."""
    pl.seed_everything(7 if seed is None else seed, verbose=False)
    case = Case(lengths=(LENGTH,), epochs=epochs, shuffle=True)
    model = Draws(case)
    loader = DataLoader(Text(case, 6), batch_size=ROWS, shuffle=True)
    trainer_of(rank, world, case, {"layout": "contiguous"}, **more).fit(model, loader)
    return model.seen, model.ids


SAME = ("pooled", "per row", "per row in place", "steps", "python", "numpy")


def test_rows_agree_on_peers_and_tokens_do_not(pool):
    """Three steps an epoch, two epochs, shards of 8, 8 and 7 tokens."""
    (first, ids), *others = pool.run(draw, 2, None, world=3)
    assert len(first) == 6
    assert ids[:6] != ids[6:]
    assert sorted(ids[:6]) == sorted(ids[6:]) == list(range(6))
    for seen, other_ids in others:
        assert other_ids == ids
        for step, other in zip(first, seen, strict=True):
            assert {name: step[name] for name in SAME} == {name: other[name] for name in SAME}
            part = len(other["tokens"][0])
            assert [row[:part] for row in step["tokens"]] != other["tokens"]
    for name in (*SAME, "tokens"):
        assert len({str(step[name]) for step in first}) == 6, name  # steps differ


def test_ids_are_those_of_one_device_in_every_epoch(pool):
    """The loader draws as if steps drew nothing."""
    (_, ids), *_ = pool.run(draw, 2, None, world=2)
    torch.manual_seed(7)
    pl.seed_everything(7, verbose=False)
    Draws(Case(lengths=(LENGTH,)))
    loader = DataLoader(range(6), batch_size=ROWS, shuffle=True)
    assert ids == [int(x) for _ in range(2) for batch in loader for x in batch]


def resumed(rank: int, world: int, path: str) -> tuple[Any, Any]:
    """One epoch, a checkpoint, and the second epoch in another run; a task of the pool."""
    pl.seed_everything(7, verbose=False)
    case = Case(lengths=(LENGTH,))
    loader = DataLoader(Text(case, 6), batch_size=ROWS)
    found = []
    for epochs, start in ((1, None), (2, path)):
        model = Draws(case)
        trainer = trainer_of(rank, world, case, {}, max_epochs=epochs)
        trainer.fit(model, loader, ckpt_path=start)
        if start is None:
            trainer.save_checkpoint(path)
        found.append(model.seen)
        torch.manual_seed(100 + epochs)  # a run that resumes has drawn something else before
    whole = Draws(case)
    pl.seed_everything(7, verbose=False)
    trainer_of(rank, world, case, {}, max_epochs=2).fit(whole, loader)
    return found[0] + found[1], whole.seen


def test_a_resumed_run_draws_what_the_uninterrupted_one_did(pool, tmp_path):
    for found, expected in pool.run(resumed, str(tmp_path / "x.ckpt"), world=2):
        assert len(expected) == 6
        assert found == expected


def on_shard(rank: int, world: int, call: Callable[..., Any], *args: Any) -> Any:
    """Run code under the context of a shard of a batch; a task of the pool."""
    batch = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64)}
    torch.manual_seed(3)
    with one_group(rank, world) as parallel:
        shard = parallel.shard(batch)
        shard.digest.wait()
        with SLOT.activate(shard.context):
            return call(shard.batch["input_ids"].shape[1], *args)


def dropouts(size: int) -> dict[str, Any]:
    torch.manual_seed(3)
    tokens, pooled = torch.ones(ROWS, size, WIDTH), torch.ones(ROWS, 5)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "functional": lambda x: F.dropout(x, 0.5),
        "module": nn.Dropout(0.5),
        "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
        "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
        "feature alpha": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
        "torch": lambda x: torch.dropout(x, 0.5, True),
    }
    found = {}
    for name, call in calls.items():
        found[name] = call(tokens)[:, :7].tolist(), call(pooled).tolist()
    features = F.dropout1d(torch.ones(ROWS, size, WIDTH), 0.5)[:, :7, 0].tolist()
    found["dropout1d"] = features, F.dropout1d(torch.ones(5, 6, 3), 0.5).tolist()
    for name, make in {
        "rand": lambda *s: torch.rand(*s),
        "randn size": lambda *s: torch.randn(size=s),
        "randint": lambda *s: torch.randint(99, s),
        "rand_like": lambda *s: torch.rand_like(torch.empty(s)),
        "randn_like": lambda *s: torch.randn_like(torch.empty(s)),
        "bernoulli": lambda *s: torch.bernoulli(torch.full(s, 0.5)),
        "bernoulli method": lambda *s: torch.full(s, 0.5).bernoulli(),
        "exponential_": lambda *s: torch.empty(s).exponential_(),
        "multinomial": lambda *s: torch.multinomial(torch.ones(s).flatten(0, -2), 3),
        "normal_": lambda *s: torch.empty(s).normal_(),
    }.items():
        own, shared = make(ROWS, size, WIDTH), make(ROWS, 5)
        cut = 7 * ROWS if name == "multinomial" else 7
        found[name] = (own[:cut] if name == "multinomial" else own[:, :7]).tolist(), shared.tolist()
    found["after"] = [0], torch.rand(1).tolist()
    return found


def test_masks_of_tokens_differ_and_others_are_the_same(pool):
    first, *others = pool.run(on_shard, dropouts, world=3)
    for other in others:
        for name, (own, shared) in first.items():
            assert shared == other[name][1], name
            assert own != other[name][0] or name == "after", name
    rates = np.array(first["functional"][0])
    assert set(np.unique(rates)) == {0, 2}
    assert 0.3 < (rates == 0).mean() < 0.7


def repeated(size: int, reentrant: bool) -> None:
    """Gradients of a checkpointed block are those of its forward's masks."""
    x = torch.ones(ROWS, size, WIDTH, requires_grad=True)
    weight = torch.full((WIDTH,), 2.0, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        noisy = F.dropout(x * weight, 0.5) * torch.rand_like(x)
        return F.dropout(noisy, 0.3) * F.dropout(torch.ones(ROWS, 1, 1), 0.5)

    out = checkpoint(block, x, use_reentrant=reentrant)
    after = torch.rand(3)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach() / 1)  # out is linear in x, which is 1
    torch.testing.assert_close(weight.grad, (out.detach() / 2).sum((0, 1)))
    assert not torch.equal(torch.rand(3), after)
    assert 0.5 < float((out == 0).double().mean()) < 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_the_masks(reentrant, pool):
    pool.run(on_shard, repeated, reentrant, world=2)


def compiled(size: int) -> tuple[Any, ...]:
    """Dropout in compiled code: masks, and whether gradients are those of the masks."""

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5)

    run = torch.compile(block, backend="aot_eager")
    tokens = torch.ones(ROWS, size, WIDTH, requires_grad=True)
    pooled = torch.ones(ROWS, 5, requires_grad=True)
    masks = []
    for x in (tokens, pooled):
        first, second = run(x)
        assert not torch.equal(first, second)
        (first + second).sum().backward()
        assert torch.equal(x.grad, first.detach() + second.detach())
        masks.append(first[:, :7].tolist())
    again = run(tokens)[0][:, :7].tolist()
    assert again != masks[0]
    return tuple(masks)


def test_compiled_dropout(pool):
    first, second = pool.run(on_shard, compiled, world=2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def alone(size: int) -> list[bool]:
    """Outside a context, with a generator of the user's, and in `local()`, all is as ever."""
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(ROWS, size, generator=generator)
    expected = torch.rand(ROWS, size, generator=torch.Generator().manual_seed(1))
    with SLOT.suspend():
        torch.manual_seed(5)
        local = F.dropout(torch.ones(ROWS, size), 0.5), torch.rand(3)
    with SLOT.activate(None):
        torch.manual_seed(5)
        outside = F.dropout(torch.ones(ROWS, size), 0.5), torch.rand(3)
    evaluated = F.dropout(torch.ones(3), 0.5, training=False)
    return [
        torch.equal(given, expected),
        all(torch.equal(a, b) for a, b in zip(local, outside, strict=True)),
        torch.equal(evaluated, torch.ones(3)),
    ]


def test_nothing_changes_elsewhere(pool):
    before = {name: getattr(torch.Tensor, name) for name in ("normal_", "bernoulli")}
    assert all(all(found) for found in pool.run(on_shard, alone, world=2))
    assert {name: getattr(torch.Tensor, name) for name in before} == before


def places(size: int) -> list[bool]:
    context = SLOT.current
    assert context is not None
    tokens = [(ROWS, size), (ROWS * size, 4), (7, size, 2), (ROWS, 4, size), (ROWS, 4, 5, size)]
    others = [(ROWS,), (ROWS, 5), (ROWS, 1, 1), (), (size,), (3, 4, size)]
    own = [whose(context, torch.Size(x)) == context.rank + 1 for x in tokens]
    return own + [whose(context, torch.Size(x)) == SHARED for x in others]


def test_what_counts_as_tokens(pool):
    for found in pool.run(on_shard, places, world=2):
        assert all(found), found
