"""What is measured: sizes, layouts and rows, checked."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_cp.balance import DOCUMENT_LAYOUTS
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.balance.rows import draws
from lightning_cp.cli.bench.packed.peer import PEER_DTYPES, check_peer
from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS
from lightning_cp.plan import SCHEDULES

ALL_LAYOUTS = (*sorted(LAYOUTS), *DOCUMENT_LAYOUTS)
DEFAULT_LAYOUTS = ("balanced", "zigzag", "per_document_zigzag")
MOST_TOKENS = min(map(sum, draws()))
LEAST_REPEATS = 2
MODES = {
    "turns": "attention forward + backward, every rank in turn in one process",
    "processes": "attention forward + backward, a process for every rank, over gloo",
    "step": "training step of a small model, a process for every rank, over gloo",
}
"""What is measured, for people."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What results must have in common to be added up.

    Attributes:
        tokens: of a row.
        ranks: that share it.
        heads: query heads, and key heads.
        head_dim: size of a head.
        dtype: a name of `DTYPES`.
        exchange: a name of `lightning_cp.plan.SCHEDULES`.
        mode: a name of `MODES`.
        layers: of the model of a step.

    Raises:
        ConfigError: if a value cannot work, with the command's option.
    """

    tokens: int
    ranks: int
    heads: int
    head_dim: int
    dtype: str
    exchange: str
    mode: str = "turns"
    layers: int = 2

    def __post_init__(self) -> None:
        for name in ("tokens", "ranks", "heads", "head_dim", "layers"):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value < 1:
                raise ConfigError(f"{option} {value} is less than 1; choose 1 or more")
        if self.tokens > MOST_TOKENS:
            raise ConfigError(
                f"--tokens {self.tokens} is more than the {MOST_TOKENS} that every row has; "
                f"choose so many or less"
            )
        for name, known in (("dtype", DTYPES), ("exchange", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"--{name} {getattr(self, name)!r} is unknown; use one of {sorted(known)}"
                )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One command.

    Attributes:
        sizes: of every draw.
        layouts: names of `ALL_LAYOUTS`, in the order in which they take turns; others are compared
            with the first.
        seeds: the rows, by number.
        repeats: runs of every layout with a row.
        peer: another package that runs beside them, or None.

    Raises:
        ConfigError: if a value cannot work, with the command's option.
    """

    sizes: Sizes
    layouts: tuple[str, ...]
    seeds: range
    repeats: int
    peer: str | None = None

    def __post_init__(self) -> None:
        most = len(draws())
        if not (self.seeds and self.seeds[0] >= 0 and self.seeds[-1] < most):
            raise ConfigError(
                f"--first {self.seeds.start} --draws {len(self.seeds)}: there are the rows "
                f"0..{most - 1}; choose at least one of them"
            )
        if self.repeats < LEAST_REPEATS:
            raise ConfigError(
                f"--repeats {self.repeats} is less than {LEAST_REPEATS}: repeated runs of the "
                f"first layout tell what noise does"
            )
        if self.peer is not None:
            if self.sizes.mode != "processes":
                raise ConfigError(
                    f"--peer {self.peer} sends messages of its own, which takes a process for "
                    f"every rank; use --mode processes"
                )
            if self.sizes.dtype not in PEER_DTYPES:
                raise ConfigError(
                    f"--dtype {self.sizes.dtype}: {self.peer} computes in half precision only; "
                    f"use one of {', '.join(PEER_DTYPES)}"
                )
            check_peer()
        if len(set(self.layouts)) < len(self.layouts):
            raise ConfigError(f"--layout: each can be given once, not {', '.join(self.layouts)}")

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**asdict(self), "seeds": [self.seeds.start, self.seeds.stop]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Settings":
        """The settings that another process was given."""
        given = {"sizes": Sizes(**values["sizes"]), "layouts": tuple(values["layouts"])}
        return cls(**{**values, **given, "seeds": range(*values["seeds"])})
