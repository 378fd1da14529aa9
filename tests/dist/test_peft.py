"""Adapters of peft on a model of transformers: trained and saved as by the plain Trainer."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from lightning_cp.fsdp import whole
from tests._harness import hf
from tests._harness.sharded import needs_sharding
from tests._harness.trainer import pool_trainer

peft = pytest.importorskip("peft")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = [
    pytest.mark.dist,
    pytest.mark.full,
    needs_sharding,
]

STEPS = 3
NAMES = ["q_proj", "v_proj", "down_proj"]
BIASES = tuple(f"{name}.base_layer.bias" for name in NAMES)
FILE = "adapter_model.safetensors"


class Found(NamedTuple):
    """What a run left: losses, gradients of every step, and parameters before and after it."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


class Adapted(pl.LightningModule):
    """A toy Llama of which adapters are trained, and a bias that peft lets be trained."""

    def __init__(self) -> None:
        super().__init__()
        config = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=NAMES, bias="lora_only", task_type="CAUSAL_LM"
        )
        self.model = peft.get_peft_model(hf.build("llama"), config)
        generator = torch.Generator().manual_seed(3)
        for name, x in self.model.named_parameters():
            if "lora_" in name:  # those of one side begin at zero, and the others draw as they like
                x.data = torch.randn(x.shape, generator=generator, dtype=torch.float64) / 4
        self.losses: list[float] = []
        self.grads: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = {name: x.grad for name, x in self.named_parameters() if x.grad is not None}
        self.grads.append({name: x.clone() for name, x in whole(grads, keep=True).items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [x for x in self.parameters() if x.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def fit(rank: int, world: int, options: dict[str, Any] | None, folder: Path) -> Found:
    """Train, and save the adapters as their users do."""
    model = Adapted()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in hf.tokens(STEPS)]
    strategy = "auto" if options is None else ContextParallelStrategy(**options)
    run = pool_trainer(rank, world, strategy, max_epochs=1, precision="64-true")
    with hf.in_double():
        run.fit(model, DataLoader(rows))
    state = run.strategy.lightning_module_state_dict()  # all ranks together, whole on the first
    if run.is_global_zero:
        adapters = {name.removeprefix("model."): x for name, x in state.items()}
        model.model.save_pretrained(folder, state_dict=adapters)
    after = whole({name: x.detach() for name, x in model.named_parameters()}, keep=True)
    return Found(model.losses, model.grads, before, after)


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (found,) = pool.run(fit, None, folder, world=1, timeout=100)
    return found, load_file(folder / FILE)


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters(stage, expected, pool, tmp_path):
    options = {"context_parallel_size": 2, "zero_stage": stage}
    plain, adapters = expected
    trained = {name for name in plain.before if "lora_" in name or name.endswith(BIASES)}
    for found in pool.run(fit, options, tmp_path, world=2, timeout=100):
        assert_close(found.losses, plain.losses, rtol=0, atol=1e-12)
        assert_close(found.grads, plain.grads, rtol=0, atol=1e-12)
        assert_close(found.after, plain.after, rtol=0, atol=1e-12)
        assert set(found.grads[0]) == trained
        moved = {name for name, x in found.before.items() if not x.equal(found.after[name])}
        assert moved == trained
    saved = load_file(tmp_path / FILE)
    assert len(saved) == len(trained)
    assert_close(saved, adapters, rtol=0, atol=1e-12)
    for name, x in saved.items():
        assert x.abs().max() > 0, name
