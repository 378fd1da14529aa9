"""Toy models of transformers with random weights, and the ways in which steps call them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]

VERSION = int(transformers.__version__.split(".")[0])
"""From 5 on, eager attention can be replaced as well."""

TEXT = (
    b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    b"age of foolishness, it was the epoch of belief, it was the epoch of incredulity"
)
VOCABULARY = 128
ROWS, LENGTH = 2, 19

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}
SILENT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "tie_word_embeddings": True,
}


def build(name: str, **options: Any) -> nn.Module:
    """A toy model in double precision, in training mode, with the same weights everywhere."""
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "llama": lambda: (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**COMMON | GROUPED | options),
        ),
        "qwen3": lambda: (
            transformers.Qwen3ForCausalLM,
            transformers.Qwen3Config(**COMMON | GROUPED | {"head_dim": 8} | options),
        ),
        "gpt2": lambda: (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=64,
                initializer_range=0.3,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
                **options,
            ),
        ),
        "bert": lambda: (
            transformers.BertForMaskedLM,
            transformers.BertConfig(**COMMON | SILENT | {"pad_token_id": 0} | options),
        ),
    }
    torch.manual_seed(11)
    kind, config = makers[name]()
    model: nn.Module = kind(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # the models themselves start at zero and one
    return model.train()


def tokens(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Bytes of a text, `[rows, length]`."""
    return torch.tensor(list(TEXT[: rows * length])).view(rows, length)


class Style(NamedTuple):
    """A way of calling a model.

    Attributes:
        batch: whole batch that the loader gives.
        call: from model and batch, whole or cut, to the output.
        options: options of the model's config.
        recomputed: with gradient checkpointing.
    """

    batch: Callable[[], Batch]
    call: Callable[[Any, Batch], Any]
    options: Mapping[str, Any] = MappingProxyType({})
    recomputed: bool = False


def plain() -> Batch:
    """Tokens, and labels of which some are ignored."""
    ids = tokens()
    labels = ids.clone()
    labels[0, 3:6], labels[1, :2] = -100, -100
    return {"input_ids": ids, "labels": labels}


def padded(*runs: tuple[int, int], length: int = LENGTH) -> Batch:
    """The same, cut off, with an attention mask that shows a run of every row."""
    batch = {name: value[:, :length].clone() for name, value in plain().items()}
    mask = torch.zeros(ROWS, length, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def packed(*rows: tuple[int, ...]) -> Batch:
    """The same with positions that start anew after documents of the given lengths."""
    positions = [torch.cat([torch.arange(size) for size in row]) for row in rows]
    return {**plain(), "position_ids": torch.stack(positions)}


def shifted() -> Batch:
    """The same with labels that are shifted already."""
    batch = plain()
    following = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return {**batch, "shift_labels": following.contiguous()}


def everything(model: Any, batch: Batch) -> Any:
    """`model(**batch)`."""
    return model(**batch)


def explicit(model: Any, batch: Batch) -> Any:
    """Tokens and labels by name, no positions."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"])


def embedded(model: Any, batch: Batch) -> Any:
    """Embeddings in place of tokens, computed in the step."""
    embeds = model.get_input_embeddings()(batch["input_ids"])
    return model(inputs_embeds=embeds, labels=batch["labels"])


def counted(model: Any, batch: Batch) -> Any:
    """A loss that is a sum over a given number of items."""
    items = torch.tensor(17)
    return model(input_ids=batch["input_ids"], labels=batch["labels"], num_items_in_batch=items)


def with_edges(model: Any, batch: Batch) -> Any:
    """Cumulative lengths of the documents of both rows, one behind the other."""
    edges = torch.tensor([0, 5, 19, 21, 23, 38], dtype=torch.int32)
    return model(**batch, cu_seq_lens_q=edges, cu_seq_lens_k=edges)


BOTH = {
    "everything": Style(plain, everything),
    "explicit": Style(plain, explicit),
    "embedded": Style(plain, embedded),
    "padded-right": Style(lambda: padded((0, 14), (0, 19)), everything),
    "padded-left": Style(lambda: padded((5, 19), (1, 19)), everything),
    "short": Style(lambda: padded((0, 2), (0, 3), length=3), everything),
    "recomputed": Style(plain, everything, recomputed=True),
}
"""Styles that suit any model."""

if VERSION > 4:
    BOTH["eager"] = Style(
        lambda: padded((0, 14), (0, 17)), everything, {"attn_implementation": "eager"}
    )

CAUSAL = {
    **BOTH,
    "shifted": Style(shifted, everything),
    "counted": Style(plain, counted),
    "packed-alike": Style(lambda: packed((5, 1, 13), (5, 1, 13)), everything, {"use_cache": False}),
    "packed": Style(lambda: packed((5, 14), (2, 2, 15)), everything, {"use_cache": False}),
    "packed-edges": Style(lambda: packed((5, 14), (2, 2, 15)), with_edges, {"use_cache": False}),
    "packed-recomputed": Style(lambda: packed((6, 13), (19,)), everything, recomputed=True),
}

BIDIRECTIONAL = {**BOTH, "packed": Style(lambda: packed((5, 14), (2, 2, 15)), everything)}
"""transformers keeps documents apart in causal models alone."""

NARROW = {"sliding_window": 5, "attn_implementation": "eager" if VERSION > 4 else "sdpa"}

EXPERTS = {"experts_implementation": "eager"}
"""The others take no doubles."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral.ForCausalLM", {"sliding_window": 5}),
    "gemma2": ("Gemma2.ForCausalLM", {**NARROW, "attn_logit_softcapping": 0.5}),
    "gemma3": ("Gemma3Text.Gemma3ForCausalLM", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt-oss": ("GptOss.ForCausalLM", {**NARROW, "num_local_experts": 4, **EXPERTS}),
    "qwen3": ("Qwen3.ForCausalLM", {"use_sliding_window": True, "sliding_window": 4}),
    "modernbert": ("ModernBert.ForMaskedLM", {"local_attention": 6, "pad_token_id": 0}),
    "deepseek": ("DeepseekV3.ForCausalLM", {}),
    "llama4": ("Llama4Text.Llama4ForCausalLM", {"attention_chunk_size": 5}),
}
"""Models whose layers see windows or chunks, cap their scores, or have sinks; by their classes."""

MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"max_window_layers": 1},
    "modernbert": {
        "global_attn_every_n_layers": 2,
        "attention_dropout": 0.0,
        "reference_compile": False,
        "classifier_dropout": 0.0,
    },
    "deepseek": {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "first_k_dense_replace": 2,
    },
    "llama4": {
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": 24,
        "num_local_experts": 2,
        "no_rope_layers": [1, 0],
        "moe_layers": [],
    },
}


def family(name: str, **changed: Any) -> nn.Module:
    """A toy model of `FAMILIES` in double, in training mode, with the same weights everywhere."""
    stem, options = FAMILIES[name]
    kind, _, head = stem.partition(".")
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    given = {**COMMON, **heads, **options, **MORE.get(name, {}), **changed}
    if name in ("modernbert", "deepseek"):
        del given["head_dim"]
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(**given)
    class_name = head if head.startswith(kind[:5]) else f"{kind}{head}"
    model: nn.Module = getattr(transformers, class_name)(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.train()


STYLES = {"llama": CAUSAL, "qwen3": CAUSAL, "gpt2": CAUSAL, "bert": BIDIRECTIONAL}


def model_of(name: str, style: Style) -> nn.Module:
    """The toy model that a style calls."""
    model: Any = build(name, **style.options)
    if style.recomputed:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    found: nn.Module = model
    return found


@contextmanager
def in_double() -> Iterator[None]:
    """The models' own casts to float32 give float64: of logits, in norms, and in softmax."""
    before: Callable[..., Tensor] = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raised = (torch.float64 if arg is torch.float32 else arg for arg in args)
        return before(self, *raised, **kwargs)

    softmax: Callable[..., Tensor] = nn.functional.softmax

    def raising(*args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return softmax(*args, dtype=None if dtype is torch.float32 else dtype, **kwargs)

    with (
        patch.object(Tensor, "float", Tensor.double),
        patch.object(Tensor, "to", to),
        patch.object(nn.functional, "softmax", raising),
    ):
        yield
