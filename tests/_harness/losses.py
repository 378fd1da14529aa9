"""Token losses as the step of a user computes them, on a whole batch or on a part of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, CLASSES, WIDTH = 2, 5, 3
IGNORED = -100

LABELS = {
    "dense": lambda s: torch.arange(BATCH * s).reshape(BATCH, s) % CLASSES,
    "prompt": lambda s: labelled(s, range(s // 2 + 1, s)),
    # With 8 tokens on 2 ranks in contiguous order: 3 valid labels on one rank, 1 on the other.
    "uneven": lambda s: labelled(s, [1, 2, 3, 4]),
    "first-only": lambda s: labelled(s, [0]),
    "none": lambda s: labelled(s, []),
}


def labelled(length: int, valid: Any) -> Tensor:
    """Labels of the first row at the positions `valid`; everything else is ignored."""
    labels = torch.full((BATCH, length), IGNORED)
    for position in (p for p in valid if p < length):
        labels[0, position] = position % CLASSES
    return labels


@dataclass(frozen=True)
class Case:
    """A loss over `[B, S]` tokens; as the step of a user would compute it."""

    labels: str = "uneven"
    length: int = 8
    loss: str = "cross_entropy"
    reduction: str = "mean"
    shape: str = "NC"
    weighted: bool = False
    smoothing: float = 0.0
    ignore: int = IGNORED
    soft: bool = False
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        """The id of the test."""
        soft = "soft" if self.soft else self.labels
        flags = f"{'-weighted' * self.weighted}{'-smooth' * bool(self.smoothing)}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.loss}-{self.reduction}-{self.shape}-{soft}-S{self.length}-{self.layout}"
            f"-{dtype}-ignore{self.ignore}{flags}"
        )

    def batch(self) -> dict[str, Tensor]:
        """The whole batch, the same on every rank."""
        generator = torch.Generator().manual_seed(self.length)
        shape = (BATCH, self.length, WIDTH)
        labels = LABELS[self.labels](self.length)
        batch = {
            "inputs_embeds": torch.randn(shape, generator=generator).to(self.dtype),
            "labels": torch.where(labels == IGNORED, self.ignore, labels),
        }
        if self.soft:
            shape = (BATCH, self.length, CLASSES)
            batch["soft"] = torch.randn(shape, generator=generator).softmax(-1).to(self.dtype)
        return batch

    def model(self) -> nn.Linear:
        """Makes the logits; its parameters take the gradients that are compared."""
        model = nn.Linear(WIDTH, CLASSES).to(self.dtype)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter).cos() + number)
        return model

    def value(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, or of a part of it."""
        logits = model(batch["inputs_embeds"])
        target = batch["soft"] if self.soft else batch["labels"]
        if self.shape == "NC":
            logits, target = logits.flatten(0, 1), target.flatten(0, 1)
        else:  # [B, C, S]
            logits = logits.transpose(1, 2)
            target = target.transpose(1, 2) if self.soft else target
        weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0]).to(self.dtype) if self.weighted else None
        options: dict[str, Any] = {"weight": weight, "reduction": self.reduction}
        if not self.soft:
            options["ignore_index"] = self.ignore
        if self.loss == "nll_loss":
            return F.nll_loss(logits.log_softmax(1), target, **options)
        return F.cross_entropy(logits, target, label_smoothing=self.smoothing, **options)


class Result(NamedTuple):
    """What a rank, or the one process, found."""

    loss: Tensor
    weight: Tensor
    bias: Tensor


def gradients(loss: Tensor, model: nn.Linear) -> Result:
    """The loss, with the gradients of its sum."""
    loss.sum().backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    return Result(loss.detach(), model.weight.grad, model.bias.grad)
