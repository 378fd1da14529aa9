"""What is measured: the options, checked, and the cases that follow from them."""

import dataclasses
import json
import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS, Layout
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES, Plan, build_plan

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class Case(NamedTuple):
    """One row of the result.

    Attributes:
        dtype: a name of `DTYPES`.
        exchange: a name of `lightning_cp.plan.SCHEDULES`.
        overlap: messages travel while tiles are computed.
    """

    dtype: str
    exchange: str
    overlap: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One benchmark: causal attention, forward and backward, of one row of tokens.

    Attributes:
        world: processes that share the row.
        seqlen: tokens of the row.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of a head.
        dtypes: names of `DTYPES`.
        layout: a name of `lightning_cp.layout.LAYOUTS`.
        exchanges: names of `lightning_cp.plan.SCHEDULES`.
        documents: lengths of packed documents, None for one.
        window: keys before its own position that a query sees, None for all.
        network: rate of an emulated link in Gbit/s, None for what the machine has.
        repeats: pairs of one launch.
        launches: how often the processes are started.
        overlaps: whether messages travel in the background; several to compare.
        seed: seed of the tensors.

    Raises:
        ConfigError: if a value cannot work, with the command's option.
    """

    world: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    dtypes: tuple[str, ...]
    layout: str
    exchanges: tuple[str, ...]
    documents: tuple[int, ...] | None
    window: int | None
    network: float | None
    repeats: int
    launches: int
    overlaps: tuple[bool, ...]
    seed: int = 13

    def __post_init__(self) -> None:
        counts = ("world", "seqlen", "heads", "kv_heads", "head_dim", "repeats", "launches")
        for name in counts:
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value < 1:
                raise ConfigError(f"{option} {value} is less than 1; choose 1 or more")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; every key head "
                f"serves as many query heads as the others"
            )
        self._check_mask()
        self._check_network()
        for exchange in self.exchanges:
            reason = self.plan(exchange, 0).rejects(self.heads)
            if reason is not None:
                raise ConfigError(f"--exchange {exchange} with --heads {self.heads}: {reason}")

    def _check_mask(self) -> None:
        documents = self.documents
        if documents is not None and min(documents, default=0) < 1:
            raise ConfigError(f"--documents {list(documents)}: a document has 1 token or more")
        if documents is not None and sum(documents) != self.seqlen:
            raise ConfigError(
                f"--documents {','.join(map(str, documents))} are {sum(documents)} tokens, "
                f"--seqlen is {self.seqlen}; they must be the same"
            )
        if self.window is not None and self.window < 0:
            raise ConfigError(f"--window {self.window} is less than 0; 0 shows each query one key")

    def _check_network(self) -> None:
        if self.network is None:
            return
        if not (self.network > 0 and math.isfinite(self.network)):
            raise ConfigError(f"--network {self.network} is no rate; choose Gbit/s above 0")
        if self.world < 2:
            raise ConfigError(
                f"--network {self.network} with --world 1: nothing travels; choose 2 or more"
            )

    @property
    def cases(self) -> tuple[Case, ...]:
        """The rows of the result; those of one dtype follow each other."""
        return tuple(
            Case(dtype, exchange, overlap)
            for dtype in self.dtypes
            for exchange in self.exchanges
            for overlap in self.overlaps
        )

    @property
    def mask(self) -> Mask:
        """Who sees whom."""
        documents = None
        if self.documents is not None:
            documents = (0, *accumulate(self.documents))
        window = None if self.window is None else (self.window, 0)
        return Mask(self.seqlen, self.seqlen, documents=documents, window=window)

    @property
    def whole_layout(self) -> Layout:
        """Who holds which tokens."""
        return LAYOUTS[self.layout](self.seqlen, self.world)

    def plan(self, exchange: str, rank: int, *, head_chunks: int | None = None) -> Plan:
        """The plan of a rank."""
        layout = self.whole_layout
        make = SCHEDULES[exchange]
        schedule = make() if head_chunks is None else make(head_chunks=head_chunks)
        return build_plan(layout, layout, self.mask, rank=rank, exchange=schedule)

    def planned_bytes(self, case: Case) -> int:
        """Bytes that all ranks together send in a forward and a backward."""
        sent = 0
        for rank in range(self.world):
            traffic = self.plan(case.exchange, rank).traffic(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                itemsize=DTYPES[case.dtype].itemsize,
                kept=True,
            )
            sent += traffic.forward_sent + traffic.backward_sent
        return sent


class Launch(NamedTuple):
    """What the processes of one launch are told.

    Attributes:
        settings: what is measured.
        first: also look at errors, bytes and memory, which do not depend on the launch.
    """

    settings: Settings
    first: bool

    def save(self, path: Path) -> None:
        """Write to a file."""
        value = {"settings": dataclasses.asdict(self.settings), "first": self.first}
        path.write_text(json.dumps(value), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> "Launch":
        """Read from a file."""
        found = json.loads(path.read_text(encoding="ascii"))
        tuples: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found["settings"].items()
        }
        return cls(Settings(**tuples), found["first"])
