"""Calls of transformers that would be wrong on a part of the sequence are refused, by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.api import ContextParallel
from lightning_cp.comm.failure import forget
from lightning_cp.config import Config
from lightning_cp.errors import ContextParallelError
from tests._harness import hf
from tests._harness.pool import Pool

pytestmark = pytest.mark.dist


class Wrong(NamedTuple):
    """A call, and the parts of the message that refuses it."""

    model: Callable[[], Any]
    batch: Callable[[], hf.Batch]
    call: Callable[[Any, hf.Batch], Any]
    words: tuple[str, ...]


def llama(**options: Any) -> Callable[[], Any]:
    return lambda: hf.build("llama", **options)


def tiny(name: str, **options: Any) -> Callable[[], Any]:
    """Any causal or other model of transformers by the stem of its classes."""

    def make() -> Any:
        import transformers

        kind, _, head = name.partition(".")
        config = getattr(transformers, f"{kind}Config")(**{**hf.COMMON, **options})
        model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
        return model.double().train()

    return make


def ids(model: Any, batch: hf.Batch) -> Any:
    return model(input_ids=batch["input_ids"])


def unmasked(model: Any, batch: hf.Batch) -> Any:
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])


def other_mask(model: Any, batch: hf.Batch) -> Any:
    """Right on the second rank, which has no padding."""
    mask = torch.ones_like(batch["attention_mask"])
    return model(input_ids=batch["input_ids"], attention_mask=mask)


def dense_mask(model: Any, batch: hf.Batch) -> Any:
    size = batch["input_ids"].shape[1]
    mask = torch.zeros(hf.ROWS, 1, size, size, dtype=torch.float64)
    return model(input_ids=batch["input_ids"], attention_mask=mask)


def cached(model: Any, batch: hf.Batch) -> Any:
    from transformers import DynamicCache

    name = "cache" if hf.VERSION > 4 else "past_key_values"
    return model(input_ids=batch["input_ids"], **{name: DynamicCache()})


def with_lengths(model: Any, batch: hf.Batch) -> Any:
    edges = torch.tensor([0, 5, hf.LENGTH], dtype=torch.int32)
    return model(input_ids=batch["input_ids"], cu_seq_lens_q=edges, cu_seq_lens_k=edges)


def blocks(model: Any, batch: hf.Batch) -> Any:
    """A mask of the model's own, as image tokens have."""
    from transformers.masking_utils import create_causal_mask

    embeds = model.get_input_embeddings()(batch["input_ids"])
    position = batch["position_ids"][0]
    options = {
        "config": model.config,
        "attention_mask": None,
        "or_mask_function": lambda b, h, q, k: q == k + 1,
    }
    if hf.VERSION > 4:
        return create_causal_mask(inputs_embeds=embeds, cache=None, **options)
    return create_causal_mask(
        input_embeds=embeds, cache_position=position, past_key_values=None, **options
    )


def answers(model: Any, batch: hf.Batch) -> Any:
    place = torch.tensor([3, 4])
    return model(input_ids=batch["input_ids"], start_positions=place, end_positions=place)


PADDED = hf.BOTH["padded-left"].batch
PACKED = hf.CAUSAL["packed"].batch

ROPE = "rope_parameters" if hf.VERSION > 4 else "rope_scaling"
NEW = ("weights", "positions-from-a-mask")
"""Cases whose message is another one with version 4, where less can be replaced."""

WRONG = {
    "window-without-mask": Wrong(
        tiny("Qwen3.ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=0),
        hf.plain,
        lambda model, batch: model(
            input_ids=batch["input_ids"], attention_mask={"sliding_attention": None}
        ),
        ("window of 4 tokens in sequences of 19", "made no mask with that window"),
    ),
    "dropout": Wrong(
        llama(attention_dropout=0.1),
        hf.plain,
        ids,
        ("'model.layers.0.self_attn' (LlamaAttention, modeling_llama.py:", "dropout of 0.1"),
    ),
    "weights": Wrong(
        llama(attn_implementation="eager"),
        hf.plain,
        lambda model, batch: model(input_ids=batch["input_ids"], output_attentions=True),
        ("output_attentions=True", "leave it off"),
    ),
    "no-mask": Wrong(llama(), PADDED, ids, ("was called without it", "pass it to the model")),
    "other-mask": Wrong(llama(), PADDED, other_mask, ("is not the padding of this batch",)),
    "dense-mask": Wrong(llama(), hf.plain, dense_mask, ("a dense attention mask of shape",)),
    "cache": Wrong(llama(), hf.plain, cached, ("a cache holds keys of whole sequences",)),
    "lengths": Wrong(llama(), hf.plain, with_lengths, ("documents='position_ids'",)),
    "blocks": Wrong(llama(), hf.plain, blocks, ("a mask of a kind of its own",)),
    "packed-with-cache": Wrong(
        llama(), PACKED, unmasked, ("use_cache=False", "documents='position_ids'")
    ),
    "packed-without-positions": Wrong(
        llama(use_cache=False), PACKED, ids, ("start anew in other places than those of the batch",)
    ),
    "packed-without-mask": Wrong(
        llama(use_cache=False),
        lambda: {**PACKED(), "attention_mask": torch.ones(hf.ROWS, hf.LENGTH)},
        unmasked,
        ("start anew in other places than those of the batch",),
    ),
    "answers": Wrong(
        tiny("Bert.ForQuestionAnswering"),
        hf.plain,
        answers,
        ("start_positions and end_positions choose among the tokens of the whole row",),
    ),
    "rescaled-rope": Wrong(
        llama(
            max_position_embeddings=8,
            **{ROPE: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ),
        hf.plain,
        ids,
        ("'dynamic' change their frequencies past 8 tokens", "of 19"),
    ),
    "positions-from-a-mask": Wrong(
        tiny("Roberta.ForMaskedLM", pad_token_id=1),
        hf.plain,
        ids,
        ("torch.cumsum over", "position_ids"),
    ),
    "last-token": Wrong(
        tiny("Llama.ForSequenceClassification", pad_token_id=0), hf.plain, ids, ("torch.arange",)
    ),
}


def run_wrong(rank: int, world: int, names: list[str]) -> dict[str, str]:
    messages = {}
    for name in names:
        wrong = WRONG[name]
        parallel = ContextParallel(
            dist.new_group(),
            meta=dist.new_group(backend="gloo"),
            rank=rank,
            world=world,
            config=Config(layout="contiguous"),
        )
        model = wrong.model()
        try:
            shard = parallel.shard(wrong.batch(), module=model)
            with parallel.active(shard):
                wrong.call(model, shard.batch)
            messages[name] = "nothing was refused"
        except ContextParallelError as error:
            messages[name] = str(error)
        finally:
            parallel.close()
            dist.barrier()
            forget()
    return messages


def test_wrong_calls(pool: Pool) -> None:
    names = [name for name in WRONG if hf.VERSION > 4 or name not in NEW]
    for rank, messages in enumerate(pool.run(run_wrong, names, world=2, timeout=100)):
        for name, message in messages.items():
            for word in WRONG[name].words:
                assert word in message, f"{name} on rank {rank}: {message}"
            assert name == "blocks" or "module" in message, f"{name}: {message}"


def run_declared(rank: int, world: int, documents: str) -> float:
    """A packed batch, called as it would not be kept apart by transformers itself."""
    parallel = ContextParallel(
        dist.new_group(),
        meta=dist.new_group(backend="gloo"),
        rank=rank,
        world=world,
        config=Config(documents=documents),
    )
    model: Any = hf.build("llama")
    batch = {**PACKED(), "attention_mask": torch.ones(hf.ROWS, hf.LENGTH)}
    try:
        with hf.in_double():
            shard = parallel.shard(batch, module=model)
            with parallel.active(shard):
                loss: Tensor = model(**shard.batch).loss
        return loss.item()
    finally:
        parallel.close()


@pytest.mark.parametrize(("documents", "apart"), [("position_ids", True), ("none", False)])
def test_declared_documents(documents: str, apart: bool, pool: Pool) -> None:
    model: Any = hf.build("llama", use_cache=False)
    batch = PACKED() if apart else {**PACKED(), "attention_mask": torch.ones(hf.ROWS, hf.LENGTH)}
    with hf.in_double():
        expected = model(**batch).loss.item()
    for loss in pool.run(run_declared, documents, world=2):
        assert loss == pytest.approx(expected, rel=1e-12)
