"""Models of transformers, unchanged, on parts of their rows equal themselves on whole rows."""

import pickle
from functools import cache
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.plugin import ContextParallelStrategy
from tests._harness import hf
from tests._harness.grid import rotated
from tests._harness.group import grads_of, one_group
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist

TOLERANCE = 1e-12
Grads = dict[str, Tensor]


class Found(NamedTuple):
    """What a step gave: loss, logits of whole rows, gradients, and shapes of square tensors."""

    loss: float
    logits: Tensor
    grads: Grads
    squares: list[tuple[int, ...]]


class Squares(TorchDispatchMode):
    """Shapes of all tensors that hold an element for every pair of tokens."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._sizes = sizes
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and set(tensor.shape[-2:]) <= set(self._sizes):
                self.found.extend([tuple(tensor.shape)] * (tensor.ndim > 1))
        return out


def run_styles(rank: int, world: int, name: str, layout: str) -> bytes:
    found = {}
    with one_group(rank, world, layout=layout) as parallel:
        for title, style in hf.STYLES[name].items():
            model = hf.model_of(name, style)
            with hf.in_double():
                shard = parallel.shard(style.batch(), module=model, stage=title)
                share = shard.cut.sequence.layout.size(rank)
                sizes = (share, hf.LENGTH) if share > 4 else ()  # not to be taken for heads
                with parallel.active(shard), Squares(*sizes) as squares:
                    out = style.call(model, shard.batch)
                    out.loss.backward()
                parallel.check(shard, out.loss)
            logits = parallel.unshard(out.logits, shard)
            found[title] = Found(out.loss.item(), logits, grads_of(model), squares.found)
    return pickle.dumps(found)


def alone(name: str, style: hf.Style) -> Found:
    """The same on one process; eager attention and that of torch's function are the same maths."""
    options = {key: value for key, value in style.options.items() if "attn" not in key}
    model = hf.model_of(name, style._replace(options=options))
    with hf.in_double():
        out = style.call(model, style.batch())
        out.loss.backward()
    return Found(out.loss.item(), out.logits.detach(), grads_of(model), [])


@cache
def styled(name: str, title: str) -> Found:
    """A style of `hf.STYLES` on one process, once for all numbers of ranks."""
    return alone(name, hf.STYLES[name][title])


def assert_equal(found: list[Found], expected: Found, batch: hf.Batch) -> None:
    real = batch.get("attention_mask", torch.ones_like(batch["labels"])) != 0
    largest = max(grad.abs().max().item() for grad in expected.grads.values())
    for rank, one in enumerate(found):
        assert one.loss == pytest.approx(expected.loss, rel=TOLERANCE), f"loss of rank {rank}"
        off = ((one.logits - expected.logits).abs().amax(-1) * real).max().item()
        assert off < TOLERANCE * expected.logits.abs().max().item(), f"logits of rank {rank}"
        assert not one.squares, f"rank {rank} made tensors {one.squares} for pairs of tokens"
    for key, grad in expected.grads.items():
        mean = sum(one.grads[key] for one in found) / len(found)
        off = (mean - grad).abs().max().item() / largest
        assert off < TOLERANCE, f"gradient of {key} is off by {off}"


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        *((name, 1, "zigzag") for name in hf.STYLES),
        *rotated(hf.STYLES, [(2, "zigzag"), (2, "contiguous"), (3, "zigzag")]),
    ],
)
def test_styles(name: str, world: int, layout: str, pool: Pool) -> None:
    ranks = pool.run(run_styles, name, layout, world=world, timeout=100)
    found = [pickle.loads(x) for x in ranks]
    for title, style in hf.STYLES[name].items():
        try:
            assert_equal([one[title] for one in found], styled(name, title), style.batch())
        except AssertionError as error:
            raise AssertionError(f"{name}, {title}: {error}") from error


def test_packed_rows_are_kept_apart() -> None:
    """What the references above compute: documents matter, where and as transformers says."""
    kept = alone("llama", hf.CAUSAL["packed"])
    mixed = alone("llama", hf.CAUSAL["packed"]._replace(options={"use_cache": True}))
    assert abs(kept.loss - mixed.loss) > 1e-3
    style = hf.BIDIRECTIONAL["packed"]
    whole = style._replace(
        batch=lambda: {**style.batch(), "attention_mask": torch.ones(2, hf.LENGTH)}
    )
    assert alone("bert", style).loss == pytest.approx(alone("bert", whole).loss, rel=1e-12)


class Lit(pl.LightningModule):
    """A plain module around a model of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: Any = hf.build(name)

    def training_step(self, batch: hf.Batch, index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(name: str) -> list[hf.Batch]:
    """Four batches of text; a model that reads both ways gets padding."""
    ids = hf.tokens(8, 12).view(4, 2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    labels = torch.where(mask == 1, ids, -100)
    extra = {"attention_mask": mask} if name == "bert" else {}
    return [{"input_ids": x, "labels": y, **extra} for x, y in zip(ids, labels, strict=True)]


def run_trainer(rank: int, world: int, name: str) -> bytes:
    module = Lit(name)
    strategy = ContextParallelStrategy(context_parallel_size=world)
    with hf.in_double():
        trainer = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true")
        trainer.fit(module, torch.utils.data.DataLoader(batches(name), batch_size=None))
    return pickle.dumps(module.state_dict())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_trainer(name: str, pool: Pool) -> None:
    model = hf.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.in_double():
        for batch in batches(name):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    for state in (pickle.loads(x) for x in pool.run(run_trainer, name, world=2)):
        for key, expected in model.state_dict().items():
            off = (state[f"model.{key}"] - expected).abs().max().item()
            assert off < 1e-11, f"{key} is off by {off}"


def traces(model: Any) -> dict[str, Any]:
    """Everything of transformers, and of a model, that preparing may touch."""
    from transformers import masking_utils, modeling_utils
    from transformers.loss import loss_utils

    return {
        "attention": dict(vars(modeling_utils.AttentionInterface)),
        "masks": dict(vars(masking_utils.AttentionMaskInterface)),
        "packed": masking_utils.find_packed_sequence_indices,
        "losses": dict(loss_utils.LOSS_MAPPING),
        "hooks": [dict(part._forward_pre_hooks) for part in model.modules()],
        "with_kwargs": [dict(part._forward_pre_hooks_with_kwargs) for part in model.modules()],
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
    }


def run_restored(rank: int, world: int) -> None:
    model: Any = hf.build("bert", hidden_act="relu").eval()
    style = hf.BOTH["padded-left"]
    before, expected = traces(model), model(**style.batch()).logits
    with one_group(rank, world) as parallel:
        shard = parallel.shard(style.batch(), module=model)
        assert traces(model)["config"] == before["config"]
        assert torch.equal(model(**style.batch()).logits, expected), "outside a context"
        with parallel.active(shard), torch.no_grad():
            model(**shard.batch)
        hooks = traces(model)["hooks"]
        parallel.shard(style.batch(), module=model)
        assert traces(model)["hooks"] == hooks, "hooked twice"
    assert traces(model) == before
    assert torch.equal(model(**style.batch()).logits, expected), "afterwards"


def test_everything_is_put_back(pool: Pool) -> None:
    pool.run(run_restored, world=2)


def run_outside(rank: int, world: int) -> None:
    from lightning_cp import functional

    for implementation in ("sdpa", "eager")[: 2 if hf.VERSION > 4 else 1]:
        model: Any = hf.build("llama", attn_implementation=implementation).eval()
        style = hf.CAUSAL["padded-right"]
        batch = style.batch()
        prompt = {
            "input_ids": hf.tokens(2, 5),
            "attention_mask": torch.ones(2, 5),
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
        }
        with torch.no_grad():
            expected, words = model(**batch).logits, model.generate(**prompt)
            with one_group(rank, world) as parallel:
                shard = parallel.shard(batch, module=model)
                with parallel.active(shard):
                    with functional.local():
                        assert torch.equal(model(**batch).logits, expected), implementation
                        assert torch.equal(model.generate(**prompt), words), implementation
                    model(**shard.batch)


def test_local_is_what_the_model_does_on_one_device(pool: Pool) -> None:
    pool.run(run_outside, world=2)
