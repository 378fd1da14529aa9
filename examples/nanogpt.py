"""A GPT in the style of nanoGPT, on two processes that hold each sequence together, and on one.

python examples/nanogpt.py

Learned positions are counted from the length, and the step shifts the tokens to make labels. Both
would be wrong on a part of a sequence, and are refused there. Two lines differ from what one device
needs, and they mean the same on one device:

    torch.arange(T)                               functional.positions(T)
    logits[:, :-1] against tokens[:, 1:]          logits against functional.shift_labels(tokens)
"""

import argparse
import inspect
import json
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelStrategy, functional

BLOCK_SIZE, LAYERS, HEADS, WIDTH, VOCABULARY = 256, 2, 4, 64, 256
STEPS = 20


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, HEADS, C // HEADS).transpose(1, 2)
            for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK_SIZE, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and "ln_" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        pos = functional.positions(T, device=tokens.device)
        x = self.wte(tokens) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits, labels = self.gpt(tokens), functional.shift_labels(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Text(Dataset):
    def __init__(self, length: int = BLOCK_SIZE) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, inspect, json))
        self.tokens, self.length = torch.tensor(list(text.encode())), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index * self.length :][: self.length]


def train(strategy: ContextParallelStrategy | str, devices: int) -> L.Trainer:
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), DataLoader(Text(), batch_size=4, shuffle=True))
    return trainer


def main() -> None:
    trainer = train(ContextParallelStrategy(), devices=2)
    if not trainer.is_global_zero:
        return
    together = trainer.callback_metrics["loss"].item()
    alone = train("auto", devices=1).callback_metrics["loss"].item()
    print(f"loss after {STEPS} steps: {together} on two processes, {alone} on one")
    if abs(together - alone) > 1e-4 * alone:
        sys.exit("the losses differ")
    print("the losses are equal")


if __name__ == "__main__":
    main()
