"""Models and data with which something is wrong."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests._harness.models import Case, LanguageModel, Text


class LocalMean(LanguageModel):
    """A mean over the tokens of one rank."""

    def loss(self, batch: Any) -> Tensor:
        return self._losses(batch).mean()

    def _losses(self, batch: Any) -> Tensor:
        logits = self.net(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")


class LocalMeanLater(LocalMean):
    """A loss that differs only after the micro-steps that are compared at once."""

    def loss(self, batch: Any) -> Tensor:
        losses = self._losses(batch)
        return losses.mean() if int(batch["id"][0]) >= 3 else losses.sum() * 0


class Shifting(LanguageModel):
    """Shifts labels inside the step."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["input_ids"], batch["position_ids"])[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class DenseMask(LanguageModel):
    """Builds the mask of padded rows, of the size that it sees."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, dense=True)


class Dropping(nn.Module):
    """Attention with dropout."""

    def forward(self, x: Tensor, mask: None) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1 * self.training)[:, 0]


class Dropout(LanguageModel):
    """Drops attention weights in training."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.blocks[1] = Dropping()


class NoAttention(LanguageModel):
    """Looks at one token at a time."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.blocks = nn.ModuleList()


class EagerAttention(nn.Module):
    """Attention by hand, which nobody sees."""

    def forward(self, x: Tensor, mask: None) -> Tensor:
        return (x @ x.mT).tril().softmax(-1) @ x


class Eager(LanguageModel):
    """Attends with a module of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.blocks = nn.ModuleList([EagerAttention()])


class IdleAttention(nn.Module):
    """Says that it attends, and does not."""

    def forward(self, x: Tensor, mask: None) -> Tensor:
        return x


class Idle(LanguageModel):
    """Looks at one token at a time."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.blocks = nn.ModuleList([IdleAttention()])


class Failing(LanguageModel):
    """Fails in its second step, on one rank."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 1:
            raise ValueError("boom")
        return super().loss(batch)


class Dying(LanguageModel):
    """One rank ends without a word."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_rank == 1:
            os._exit(1)
        return super().loss(batch)


class TakingTheIterator(LanguageModel):
    """Fetches its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Predicting(LanguageModel):
    """Returns the most likely tokens of all rows in one row, which nobody can put together."""

    def predict_step(self, batch: Any, index: int) -> Tensor:
        found: Tensor = self.net(batch["input_ids"], batch["position_ids"]).argmax(-1).flatten()
        return found


class FailingData(Text):
    """Has a sample that one rank cannot read."""

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() == 1 and index == 4:
            raise OSError("no such sample")
        return super().__getitem__(index)
