"""An ordinary Lightning project: a small decoder learns the text of the standard library.

python examples/existing_project.py --strategy auto --devices 1
python examples/existing_project.py --strategy context_parallel --devices 2
lightning-cp verify examples/existing_project.py:model_and_batch

The second holds every sequence on two processes, and prints the same final loss; the third compares
one step of both, module by module. What a project must have for that is what this one has: the
decoder takes the positions of its tokens, and labels are shifted in the data set.
"""

import argparse
import inspect
import json

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_cp  # noqa: F401  (registers "context_parallel")

SEQLEN, WIDTH, HEADS = 512, 64, 4


class Text(Dataset):
    def __init__(self) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, inspect, json))
        self.bytes = torch.tensor(list(text.encode()))

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // SEQLEN

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.bytes[index * SEQLEN :][: SEQLEN + 1]
        return {
            "input_ids": window[:-1],
            "labels": window[1:],
            "position_ids": torch.arange(SEQLEN),
        }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(input_ids) + self.positions(position_ids)))


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.decoder(batch["input_ids"], batch["position_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def model_and_batch() -> tuple[LanguageModel, dict[str, Tensor]]:
    return LanguageModel(), next(iter(DataLoader(Text(), batch_size=2)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="context_parallel")
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), DataLoader(Text(), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print("final loss", trainer.callback_metrics["loss"].item())


if __name__ == "__main__":
    main()
