"""LitGPT's model, unchanged, on parts of its rows equals itself on whole rows."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallel, functional, verify
from lightning_cp.api import Shard
from lightning_cp.errors import RefusedError
from tests._harness import hf
from tests._harness.group import grads_of, one_group
from tests._harness.pool import Pool

litgpt = pytest.importorskip("litgpt.model")
pytestmark = pytest.mark.dist

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP"},
    "partial": {"rotary_percentage": 0.5, "parallel_residual": True},
}


def build(name: str) -> Any:
    config = litgpt.Config(
        **{"rotary_percentage": 1.0, "parallel_residual": False, "intermediate_size": 24}
        | SHAPES[name],
        block_size=64,
        n_layer=2,
        n_head=4,
        n_embd=16,
        vocab_size=hf.VOCABULARY,
        padded_vocab_size=hf.VOCABULARY,
    )
    torch.manual_seed(3)
    model = litgpt.GPT(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def step(model: Any, batch: hf.Batch) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def refuse(model: Any, shard: Shard, parallel: ContextParallel) -> None:
    """What would be wrong on a part of a row."""
    with parallel.active(shard):
        with pytest.raises(RefusedError, match="input_pos reads a cache"):
            model(shard.batch["input_ids"], torch.arange(3))
        model.max_seq_length = hf.LENGTH - 1
        with pytest.raises(RefusedError, match="sequences of 19 tokens, but max_seq_length is 18"):
            model(shard.batch["input_ids"])
        model.max_seq_length = 64


def check(model: Any, whole: hf.Batch, parallel: ContextParallel) -> None:
    """Verify has nothing to say."""
    report = verify(
        model, whole, parallel=parallel, step=lambda batch: step(model, batch), show=False
    )
    assert report.ok, report.finding
    assert report.compared.attention == (2, 2)


def run_model(rank: int, world: int, name: str) -> bytes:
    model, whole = build(name), hf.plain()
    tables = model.cos, model.sin
    with hf.in_double(), one_group(rank, world) as parallel:
        expected = model(whole["input_ids"])
        shard = parallel.shard(whole, module=model)
        with parallel.active(shard):
            loss = step(model, shard.batch)
            loss.backward()
            grads = grads_of(model)
            with functional.local(), torch.no_grad():
                assert torch.equal(model(whole["input_ids"]), expected)
        assert model.cos is tables[0]
        assert model.sin is tables[1]
        if world > 1:
            refuse(model, parallel.shard(whole, module=model), parallel)
            check(model, whole, parallel)
    assert not model._forward_pre_hooks
    return pickle.dumps((loss.item(), grads))


@pytest.mark.parametrize(("name", "world"), [("grouped", 1), ("grouped", 3), ("partial", 2)])
def test_gpt(pool: Pool, name: str, world: int) -> None:
    model = build(name)
    with hf.in_double():
        loss = step(model, hf.plain())
        loss.backward()
    found = [pickle.loads(x) for x in pool.run(run_model, name, world=world)]
    assert [x for x, _ in found] == pytest.approx([loss.item()] * world, rel=1e-12)
    for key, grad in grads_of(model).items():
        mean = sum(grads[key] for _, grads in found) / world
        torch.testing.assert_close(mean, grad, rtol=1e-10, atol=1e-12, msg=key)
