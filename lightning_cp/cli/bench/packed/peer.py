"""ring-flash-attn's zigzag within every document, as an arm beside the layouts of this package."""

import importlib
import importlib.util
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_cp.cli.bench.attention.measure import Attention
from lightning_cp.errors import ConfigError

PEER = "ring-flash-attn"
PEER_DTYPES = ("bf16", "fp16")
PACKAGES = ("ring_flash_attn", "flash_attn")


def check_peer() -> None:
    """Whether the peer can be run.

    Raises:
        ConfigError: if a package that it needs is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--peer {PEER}: {' and '.join(missing)} cannot be imported; pip install "
            f"ring-flash-attn, and flash-attn or, on a CPU, a stand-in for it on PYTHONPATH "
            f"(tests/_harness/peers of this project's sources has one)"
        )


def peer_lengths(lengths: Sequence[int], world: int) -> tuple[int, ...]:
    """Lengths as the peer takes them: multiples of `2 * world`, rounded up."""
    chunks = 2 * world
    return tuple(length + -length % chunks for length in lengths if length)


def peer_bytes(lengths: Sequence[int], world: int, *, row: int, itemsize: int) -> int:
    """Bytes that each rank receives in a forward and a backward.

    Args:
        lengths: see `peer_lengths`.
        world: number of ranks.
        row: elements of a key and its value, all heads.
        itemsize: bytes of an element; gradients go once around in four.
    """
    shard = row * (sum(lengths) // world)
    return shard * (2 * (world - 1) * itemsize + world * 4)


class PeerCall:
    """Forward and backward of one rank.

    Args:
        lengths: see `peer_lengths`.
        whole: `q, k, v` and the gradient of the output, `[N, H, D]` of the whole row.
        rank: of this process.
        world: number of ranks.
        group: process group.
    """

    def __init__(
        self, lengths: Sequence[int], whole: Sequence[Tensor], *, rank: int, world: int, group: Any
    ) -> None:
        self._run: Any = importlib.import_module(PACKAGES[0]).zigzag_ring_flash_attn_varlen_func
        own = positions(lengths, rank, world)
        q, k, v, grad = (x[own].contiguous() for x in whole)
        self._inputs, self._grad = tuple(x.requires_grad_() for x in (q, k, v)), grad
        local = [length // world for length in lengths]
        self._edges = torch.tensor([0, *accumulate(local)], dtype=torch.int32)
        self._longest, self._group = max(local), group

    def __call__(self) -> Attention:
        """Run once, every rank together; tensors of the local tokens, `[N, H, D]`."""
        out = self._run(*self._inputs, self._edges, self._longest, causal=True, group=self._group)
        return Attention(out, *torch.autograd.grad(out, self._inputs, self._grad))


def positions(lengths: Sequence[int], rank: int, world: int) -> Tensor:
    """Which tokens a rank holds: chunks `rank` and `2 * world - 1 - rank` of every document."""
    found = []
    for start, stop in pairwise([0, *accumulate(lengths)]):
        size = (stop - start) // (2 * world)
        for chunk in (rank, 2 * world - 1 - rank):
            found.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(found)
