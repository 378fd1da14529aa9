"""A tiny GPT on real text, its data, and one whole training run of it inside a rank of the pool."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelStrategy, checkpoint_policy, functional
from lightning_cp.fsdp import whole
from lightning_cp.swap._torch import OPERATORS, has_override, keys
from tests._harness.text import text
from tests._harness.trainer import Hosted, pool_trainer

VOCABULARY, POSITIONS, IGNORED = 256, 64, -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one training run is made of; equal cases give equal runs.

    Attributes:
        lengths: sequence length of every batch, repeated; more than one only without shuffling.
        samples: number of training samples, which is also the epoch.
        batch: rows per batch.
        epochs: number of epochs.
        kind: type of a batch. A tensor is `[B, S, 3]`: token, label, id.
        valid: which labels count: "uneven" hides a prompt of another length in every sample,
            "front" all but the first two, "empty" all of the second batch; or the positions.
        padding: rows whose `attention_mask` hides a run of tokens on these sides.
        offset: the batch has position_ids that start here; None: the batch has none.
        positions: what the model does without position_ids: plain arange, or the public function.
        heads: query heads, 4 channels each.
        kv_heads: key heads.
        recomputed: what is computed again in the backward; of "kept" blocks not the attention.
        optimisation: by the Trainer, by hand, or by hand with one backward for two batches.
        shuffle: what the user asked of the loader.
        momentum: of SGD.
        precision: of the Trainer.
        trainer: other options of the Trainer.
    """

    lengths: tuple[int, ...] = (24,)
    samples: int = 6
    batch: int = 2
    epochs: int = 1
    kind: Literal["dict", "tuple", "tensor"] = "dict"
    valid: Literal["uneven", "front", "empty"] | tuple[int, ...] = "uneven"
    padding: tuple[Literal["left", "right"], ...] = ()
    offset: int | None = None
    positions: Literal["arange", "functional"] = "arange"
    heads: int = 4
    kv_heads: int = 4
    recomputed: Literal["nothing", "blocks", "kept", "everything"] = "nothing"
    optimisation: Literal["automatic", "manual", "delayed"] = "automatic"
    shuffle: bool = False
    momentum: float = 0.0
    precision: Any = "32-true"
    trainer: tuple[tuple[str, Any], ...] = ()


class Text(Dataset[Any]):
    """Pieces of the text; sample `i` has the id `i`.

    Args:
        case: lengths, labels, padding and container.
        samples: number of samples.
        first: index of the first piece, so that validation reads something else.
    """

    def __init__(self, case: Case, samples: int, first: int = 0) -> None:
        self._case, self._samples, self._first = case, samples, first

    def __len__(self) -> int:
        """Number of samples."""
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """One sample, labels aligned with the logits."""
        case = self._case
        length = case.lengths[index // case.batch % len(case.lengths)]
        start = 97 * (index + self._first)
        piece = torch.tensor(list(text()[start : start + length + 1]))
        tokens, labels = piece[:-1], piece[1:].clone()
        labels[~self._valid(index, length)] = IGNORED
        sample = {"input_ids": tokens, "labels": labels, "id": torch.tensor(index)}
        if case.padding:
            sample["attention_mask"] = self._visible(index, length)
            labels[sample["attention_mask"] == 0] = IGNORED
        if case.offset is not None:
            sample["position_ids"] = torch.arange(length) + case.offset
        if case.kind == "tuple":
            return tuple(sample.values())
        if case.kind == "tensor":
            return torch.stack([tokens, labels, torch.full_like(tokens, index)], -1)
        return sample

    def _valid(self, index: int, length: int) -> Tensor:
        valid, places = self._case.valid, torch.arange(length)
        if valid == "front":
            return places < 2
        if valid == "empty" and index // self._case.batch == 1:
            return places < 0
        if isinstance(valid, tuple):
            return torch.isin(places, torch.tensor(valid))
        return places >= (7 * index + 3) % length

    def _visible(self, index: int, length: int) -> Tensor:
        side = self._case.padding[index % len(self._case.padding)]
        hidden = 3 + index % 4
        visible = torch.ones(length, dtype=torch.int64)
        visible[slice(hidden) if side == "left" else slice(length - hidden, None)] = 0
        return visible


class Attention(nn.Module):
    """Causal self-attention with grouped keys; a dense mask only where one is given."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q = nn.Linear(4 * heads, 4 * heads)
        self.kv = nn.Linear(4 * heads, 8 * kv_heads)
        self.out = nn.Linear(4 * heads, 4 * heads)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, 4)).permute(2, 0, 3, 1, 4)
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, enable_gqa=grouped)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """Attention and an MLP, both residual."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        width = 4 * heads
        self.norm, self.attention = nn.LayerNorm(width), Attention(heads, kv_heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        x = x + self.attention(self.norm(x), mask)
        mixed: Tensor = x + self.mlp(x)
        return mixed


class GPT(nn.Module):
    """Two blocks between embeddings and a head.

    Args:
        case: heads, positions, recomputation.
        dense: build the mask of padded rows, as a model does on one device.
    """

    def __init__(self, case: Case, dense: bool) -> None:
        super().__init__()
        width = 4 * case.heads
        self.case, self.dense = case, dense
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList(Block(case.heads, case.kv_heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, S, V]` of `[B, S]` tokens."""
        if position_ids is None:
            numbers = torch.arange if self.case.positions == "arange" else functional.positions
            position_ids = numbers(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.places(position_ids)
        mask = None
        if self.dense and attention_mask is not None:
            size = input_ids.shape[1]
            mask = torch.ones(size, size, dtype=torch.bool).tril() & attention_mask.bool()[:, None]
            mask = (mask | torch.eye(size, dtype=torch.bool))[:, None]
        for block in self.blocks:
            if self.case.recomputed in ("blocks", "kept"):
                keep = checkpoint_policy() if self.case.recomputed == "kept" else noop_context_fn
                x = checkpoint(block, x, mask, use_reentrant=False, context_fn=keep)
            else:
                x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


class Steps(Hosted):
    """Trains the GPT, and remembers what it saw; in front of a LightningModule of any package.

    Args:
        case: everything about the run.
        dense: see `GPT`.
    """

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__()
        self.case, self.net = case, GPT(case, dense)
        self.automatic_optimization = case.optimisation == "automatic"
        self.ids: list[int] = []
        self.logged: list[float] = []
        self.swapped: set[bool] = set()
        self.expected_steps = 0.0
        self._waiting: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        """Mean over the valid tokens."""
        tokens, labels, _, *rest = self.fields(batch)

        def forward() -> Tensor:
            logits = self.net(tokens, *rest).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)

        if self.case.recomputed != "everything":
            return forward()
        again: Tensor = checkpoint(forward, use_reentrant=False)
        return again

    def fields(self, batch: Any) -> tuple[Any, ...]:
        """Tokens, labels and ids; of a dict also positions and mask, None where it has none."""
        if isinstance(batch, Tensor):
            return batch[..., 0], batch[..., 1], batch[:, 0, 2]
        if isinstance(batch, Mapping):
            names = ("input_ids", "labels", "id", "position_ids", "attention_mask")
            return tuple(batch.get(name) for name in names)
        return tuple(batch)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Log the loss, and optimise by hand where the case says so."""
        loss = self.loss(batch)
        self.ids += self.fields(batch)[2].tolist()
        self.swapped.add(overridden())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            self._optimise(loss)
        return loss

    def _optimise(self, loss: Tensor) -> None:
        """One step for every batch, or for every two with one backward for both."""
        self._waiting.append(loss)
        if len(self._waiting) < (2 if self.case.optimisation == "delayed" else 1):
            return
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.stack(self._waiting).sum())
        self._waiting = []
        optimizer.step()

    def validation_step(self, batch: Any, index: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD: Adam would hide a wrong scale of the gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=self.case.momentum)

    def on_train_start(self) -> None:
        """Ask what schedulers ask."""
        self.expected_steps = float(self.trainer.estimated_stepping_batches)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What a logger would see."""
        self.logged.append(float(self.trainer.callback_metrics["train_loss_step"]))


class LanguageModel(Steps, pl.LightningModule):
    """For Trainers of `lightning.pytorch`."""


class Outcome(NamedTuple):
    """What is left of a run on one rank."""

    parameters: dict[str, NDArray[Any]]
    step_losses: list[float]
    metrics: dict[str, float]
    ids: list[int]
    counts: dict[str, float]
    swapped: bool


def overridden() -> bool:
    """Whether anything is installed in this process."""
    return any(has_override(name, key) for name in OPERATORS for key in keys("cpu"))


def loaders(case: Case) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training and for validation."""
    make = partial(DataLoader, batch_size=case.batch)
    train = make(Text(case, case.samples), shuffle=case.shuffle)
    return train, make(Text(case, 2 * case.batch, first=case.samples))


def trainer_of(
    rank: int, world: int, case: Case, options: Mapping[str, Any] | None, **more: Any
) -> pl.Trainer:
    """The Trainer of a run.

    Args:
        rank: rank of this process.
        world: number of ranks.
        case: what to run.
        options: of the context-parallel strategy; None: the plain Trainer on `world` devices.
        more: options of the Trainer beside those of the case.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # else a launcher chooses, and sums are added up otherwise
    strategy: Any = "auto" if world == 1 else DDPStrategy(process_group_backend="gloo")
    if options is not None:
        strategy = ContextParallelStrategy(**options)
    settings = {"max_epochs": case.epochs, "precision": case.precision}
    settings |= {"num_sanity_val_steps": 0, **dict(case.trainer), **more}
    return pool_trainer(rank, world, strategy, **settings)


def seeded(
    case: Case, dense: bool = False, kind: type[LanguageModel] = LanguageModel
) -> LanguageModel:
    """The module with its initial parameters, the same for every run."""
    pl.seed_everything(7, verbose=False)
    return kind(case, dense)


def outcome(trainer: pl.Trainer, model: LanguageModel) -> Outcome:
    """What is left after `fit`."""
    return Outcome(
        {name: whole(p, keep=True).detach().numpy().copy() for name, p in model.named_parameters()},
        model.logged,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        model.ids,
        {
            "optimiser steps": trainer.global_step,
            "batches of an epoch": trainer.num_training_batches,
            "estimated steps": model.expected_steps,
        },
        any(model.swapped),
    )


def fit(
    rank: int,
    world: int,
    case: Case,
    options: Mapping[str, Any] | None = None,
    kind: type[LanguageModel] = LanguageModel,
) -> Outcome:
    """Train a module of a kind, and validate; a task of the pool. See `trainer_of`."""
    model = seeded(case, options is None, kind)
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(model, *loaders(case))
    return outcome(trainer, model)


def evaluate(
    rank: int, world: int, case: Case, options: Mapping[str, Any] | None, stage: str
) -> dict[str, float]:
    """Metrics of `validate` or `test` alone; a task of the pool."""
    model = seeded(case, dense=options is None)
    trainer = trainer_of(rank, world, case, options)
    getattr(trainer, stage)(model, loaders(case)[1], verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def furthest(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Largest absolute difference of parameters, and relative difference of logged losses."""
    return {
        "parameters": max(
            float(np.abs(found.parameters[name] - value).max())
            for name, value in expected.parameters.items()
        ),
        "step losses": _relative(found.step_losses, expected.step_losses),
        "metrics": _relative(
            [found.metrics[name] for name in expected.metrics], list(expected.metrics.values())
        ),
    }


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    a, b = np.array(found), np.array(expected)
    return float((np.abs(a - b) / np.maximum(np.abs(b), 1)).max())
