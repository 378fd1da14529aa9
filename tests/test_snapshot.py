"""A verification leaves no trace: what a step changes is put back."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from lightning_cp.diagnostics.verify.snapshot import (
    changed_parameters,
    parameter_versions,
    unchanged,
    without_dropout,
)


class Counting(nn.Module):
    """Changes everything a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)
        self.attention_dropout = 0.1
        self.register_buffer("steps", torch.zeros(()))
        self.metrics = MetricCollection({"mean": MeanMetric()})
        self.seen: list[int] = [1]
        self.table: dict[str, Any] = {"a": [torch.zeros(2)], "b": {1}}
        self.average = torch.zeros(2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Change it all."""
        self.metrics["mean"].update(x.sum())
        self.seen.append(len(self.seen))
        self.table["a"][0] += 1
        self.table["a"].append(self.average)
        self.table["b"].add(2)
        self.table["c"] = 1
        self.average += 1
        self.calls += 1
        self.steps = self.steps + 1
        self.fresh = "attribute"
        self.eval()
        out: Tensor = self.drop(self.linear(self.norm(x)))
        return out


def state(module: Counting) -> dict[str, Any]:
    return {
        "buffers": {name: x.clone() for name, x in module.named_buffers()},
        "metric": float(module.metrics["mean"].compute()),
        "seen": list(module.seen),
        "table": {"a": [x.clone() for x in module.table["a"]], "b": sorted(module.table["b"])},
        "keys": sorted(module.table),
        "average": module.average.clone(),
        "calls": module.calls,
        "training": [part.training for part in module.modules()],
        "attributes": sorted(vars(module)),
        "rates": (module.drop.p, module.attention_dropout),
        "gradient": module.linear.weight.grad.clone(),
        "random": (torch.rand(1), np.random.rand(), random.random()),
    }


def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def test_everything_is_put_back() -> None:
    module = Counting()
    module.metrics["mean"].update(3.0)
    module.linear(torch.ones(2, 3)).sum().backward()
    gradient, buffer, seen = module.linear.weight.grad, module.steps, module.seen
    seeded()
    before = state(module)
    seeded()
    with unchanged(module):
        assert without_dropout(module) == 2
        assert (module.drop.p, module.attention_dropout) == (0.0, 0.0)
        for _ in range(2):
            module.train()
            module(torch.randn(4, 3) + random.random() + np.random.rand()).sum().backward()
        assert module.calls == 2
    after = state(module)
    assert str(after) == str(before)
    assert module.linear.weight.grad is gradient  # who holds an object still holds the right one
    assert module.steps is buffer
    assert module.seen is seen


def test_an_error_puts_back_too() -> None:
    module = Counting()
    try:
        with unchanged(module):
            module(torch.ones(4, 3))
            raise KeyError
    except KeyError:
        pass
    assert module.calls == 0
    assert module.training


def test_gradients_that_were_none_are_none_again() -> None:
    module = nn.Linear(2, 2)
    with unchanged(module):
        module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is None


def test_written_parameters_are_named() -> None:
    module = nn.Linear(2, 2)
    versions = parameter_versions(module)
    module(torch.ones(1, 2)).sum().backward()
    assert changed_parameters(module, versions) == []
    with torch.no_grad():
        module.bias.add_(1)
    assert changed_parameters(module, versions) == ["bias"]
