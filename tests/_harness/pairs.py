"""Models that read two sequences: encoder-decoders, pairs, and keys that every rank holds."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.data.containers import leaves
from tests._harness.hf import VOCABULARY

ROWS, WIDTH = 2, 16

Batch = dict[str, Any]
Dims = Mapping[str, Any]


class Found(NamedTuple):
    """What a step gives: a loss, and outputs of whole rows."""

    loss: Tensor
    outputs: dict[str, Tensor]


class Pair(NamedTuple):
    """A model of two sequences.

    Attributes:
        make: the model in double precision, in training mode, with the same weights everywhere.
        batch: a whole batch of a source and a target of the given lengths; True: with padding.
        call: a step on a batch, whole or cut.
        dims: declared sequence dimensions.
        attention: calls of attention in a step.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, bool], Batch]
    call: Callable[[Any, Batch], Found]
    dims: Dims
    attention: int


def tokens(length: int, seed: int) -> Tensor:
    """Tokens from 3 on, `[ROWS, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)


def padding(length: int, *, left: bool) -> Tensor:
    """1 for tokens and 0 for padding, of which the last row has a third."""
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    hidden = length // 3
    if hidden:
        mask[-1, slice(0, hidden) if left else slice(length - hidden, length)] = 0
    return mask


def seeded(model: nn.Module) -> nn.Module:
    """The model in double precision with the same random weights everywhere."""
    model.double()
    torch.manual_seed(11)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return model.train()


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def bart() -> nn.Module:
    """Learned positions."""
    config = transformers.BartConfig(**COMMON)
    return seeded(transformers.BartForConditionalGeneration(config))


def marian() -> nn.Module:
    """Sinusoidal positions."""
    config = transformers.MarianConfig(**COMMON)
    return seeded(transformers.MarianMTModel(config))


def t5() -> nn.Module:
    """A bias by distance in place of positions."""
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    config = transformers.T5Config(**options)
    return seeded(transformers.T5ForConditionalGeneration(config))


def whisper() -> nn.Module:
    """An encoder with convolutions, whose outputs every rank holds."""
    config = transformers.WhisperConfig(
        **COMMON, num_mel_bins=4, max_source_positions=11, max_target_positions=64
    )
    return seeded(transformers.WhisperForConditionalGeneration(config))


def translation(source: int, target: int, padded: bool) -> Batch:
    """What a collator for sequence-to-sequence models of transformers gives."""
    batch: Batch = {"input_ids": tokens(source, 1), "labels": tokens(target, 2)}
    if padded:
        batch["attention_mask"] = padding(source, left=False)
        batch["labels"][padding(target, left=False) == 0] = -100
    return batch


def decoded(source: int, target: int, padded: bool) -> Batch:
    """The same with inputs of the decoder, padded on the left."""
    batch: Batch = {
        "input_ids": tokens(source, 1),
        "decoder_input_ids": tokens(target, 3),
        "labels": tokens(target, 2),
    }
    if padded:
        batch["attention_mask"] = padding(source, left=True)
        batch["decoder_attention_mask"] = padding(target, left=True)
        batch["labels"][batch["decoder_attention_mask"] == 0] = -100
    return batch


def heard(source: int, target: int, padded: bool) -> Batch:
    """Outputs of an encoder, and labels."""
    generator = torch.Generator().manual_seed(3)
    frames = torch.randn(ROWS, source, WIDTH, generator=generator, dtype=torch.float64)
    return {"frames": frames, "labels": tokens(target, 2)}


def everything(model: Any, batch: Batch) -> Found:
    """`model(**batch)`."""
    out = model(**batch)
    return Found(out.loss, {"logits": out.logits, "encoded": out.encoder_last_hidden_state})


def listening(model: Any, batch: Batch) -> Found:
    """The decoder on given outputs of an encoder."""
    out = model(encoder_outputs=(batch["frames"],), labels=batch["labels"])
    return Found(out.loss, {"logits": out.logits})


class Translator(nn.Module):
    """`nn.Transformer` with embeddings, tokens first where it says so."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        with warnings.catch_warnings():  # that tokens first cannot be nested
            warnings.simplefilter("ignore")
            self.body = nn.Transformer(
                WIDTH, 2, 2, 2, dim_feedforward=24, dropout=0.0, batch_first=batch_first
            )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, src: Tensor, tgt: Tensor, hidden: Tensor | None) -> Tensor:
        """Logits `[B, T, V]` of tokens `[B, S]` and `[B, T]`; True in `hidden` is padding."""
        both = self.source(src), self.target(tgt)
        if not self.batch_first:
            both = both[0].transpose(0, 1), both[1].transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=torch.float64)
        out = self.body(
            *both,
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        out = out if self.batch_first else out.transpose(0, 1)
        logits: Tensor = self.head(out)
        return logits


def pair_of_tokens(source: int, target: int, padded: bool) -> Batch:
    """Tokens and labels with names that say nothing."""
    batch: Batch = {"src": tokens(source, 1), "tgt": tokens(target, 3), "goal": tokens(target, 2)}
    if padded:
        batch["src_attention_mask"] = padding(source, left=False)
        batch["goal"][padding(target, left=False) == 0] = -100
    return batch


def translate(model: Any, batch: Batch) -> Found:
    """A step as one would write it for one device."""
    mask = batch.get("src_attention_mask")
    logits = model(batch["src"], batch["tgt"], None if mask is None else mask == 0)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["goal"].flatten(), ignore_index=-100)
    return Found(loss, {"logits": logits})


TRANSLATED = {
    "src": ("source", 1),
    "src_attention_mask": ("source", 1),
    "tgt": ("target", 1),
    "goal": ("target", 1),
}


class Towers(nn.Module):
    """One encoder for questions and answers, pooled over their tokens and compared."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states `[B, S, H]` of one side, and their mean over tokens `[B, H]`."""
        from lightning_cp import functional

        hidden = self.encoder(**batch).last_hidden_state
        return hidden, functional.sequence_mean(hidden, mask=batch.get("attention_mask"))


def sides(source: int, target: int, padded: bool) -> Batch:
    """A question and an answer, each with its own padding."""
    batch: Batch = {
        "question": {"input_ids": tokens(source, 1)},
        "answer": {"input_ids": tokens(target, 2)},
    }
    if padded:
        batch["question"]["attention_mask"] = padding(source, left=False)
        batch["answer"]["attention_mask"] = padding(target, left=True)
    return batch


def compare(model: Any, batch: Batch) -> Found:
    """A contrastive loss over the rows of the batch."""
    (left, a), (right, b) = (model(batch[side]) for side in ("question", "answer"))
    scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    loss = F.cross_entropy(10 * scores, torch.arange(len(scores)))
    return Found(loss, {"question": left, "answer": right, "scores": scores})


SIDES = {
    f"{side}.{name}": (side, 1)
    for side in ("question", "answer")
    for name in ("input_ids", "attention_mask")
} | {"predictions.scores": None}

PAIRS = {
    "bart": Pair(bart, translation, everything, {}, 6),
    "bart-decoded": Pair(bart, decoded, everything, {"decoder_input_ids": ("tgt", 1)}, 6),
    "marian": Pair(marian, translation, everything, {}, 6),
    "t5": Pair(t5, translation, everything, {}, 6),
    "whisper": Pair(whisper, heard, listening, {"frames": ("frames", 1, "whole")}, 4),
    "transformer": Pair(
        lambda: seeded(Translator(batch_first=True)), pair_of_tokens, translate, TRANSLATED, 6
    ),
    "tokens-first": Pair(
        lambda: seeded(Translator(batch_first=False)), pair_of_tokens, translate, TRANSLATED, 6
    ),
    "towers": Pair(lambda: seeded(Towers()), sides, compare, SIDES, 4),
}
"""Every kind of model, by name."""


def real(batch: Batch, output: Tensor) -> Tensor:
    """Where an output of whole rows is no padding: bool `[ROWS, S]`, or of its first dimension."""
    found = torch.ones(output.shape[:2], dtype=torch.bool)
    for _, value in leaves(batch):
        if value.shape == found.shape and not value.is_floating_point() and value.max() == 1:
            found &= value == 1  # an attention mask
    return found
