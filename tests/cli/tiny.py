"""A project with a LightningCLI and nothing of ours: `python tiny.py fit --config by_name.yaml`.

The environment variable TINY_PACKAGE says which Lightning it is written for.
"""

import os
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

pl = import_module(os.environ.get("TINY_PACKAGE", "lightning.pytorch"))


class Tiny(pl.LightningModule):
    """One attention layer; `counting` embeds positions that are right on one device only."""

    def __init__(self, width: int = 16, counting: bool = False) -> None:
        super().__init__()
        self.counting = counting
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(64, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 32)

    def training_step(self, batch, index):
        places = batch["position_ids"]
        if self.counting:
            places = torch.arange(places.shape[1])
        x = self.tokens(batch["input_ids"]) + self.places(places)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_batch_end(self, outputs, batch, index):
        if self.trainer.is_global_zero:
            print("loss", outputs["loss"].item())

    def on_fit_end(self):
        strategy = self.trainer.strategy
        if self.trainer.is_global_zero and hasattr(strategy, "topology"):
            print("groups", strategy.topology.dp, strategy.topology.cp)


class Data(pl.LightningDataModule):
    """Rows of a fixed random text; `prepare_data` draws random numbers on the first rank only."""

    def __init__(self, length: int = 21) -> None:
        super().__init__()
        self.length = length
        self.rows: list[dict[str, torch.Tensor]] = []

    def prepare_data(self):
        torch.rand(3)

    def setup(self, stage):
        numbers = torch.Generator().manual_seed(5)
        for _ in range(6):
            text = torch.randint(32, (self.length + 1,), generator=numbers)
            self.rows.append({"input_ids": text[:-1], "labels": text[1:]})

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=2)

    def on_after_batch_transfer(self, batch, index):
        places = torch.arange(self.length).expand_as(batch["labels"])
        return {**batch, "position_ids": places}


if __name__ == "__main__":
    cli = import_module(f"{pl.__name__}.cli")
    cli.LightningCLI(save_config_callback=None)
