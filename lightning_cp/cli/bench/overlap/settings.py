"""What is measured, checked."""

from dataclasses import dataclass

from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.errors import ConfigError
from lightning_cp.gathers import WINDOWS

ARMS = (*WINDOWS, "auto")
LEAST_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the model and of the job.

    Attributes:
        world: processes; they share every row and every parameter.
        seqlen: tokens of a row.
        layers: blocks of attention and of two linear layers that are four times as wide.
        width: channels.
        heads: query and key heads.
        dtype: a name of `DTYPES`.
        network: Gbit/s of the link that keys, values and gathered parameters share.
        repeats: rounds, in each of which every window has one step.

    Raises:
        ConfigError: if a value cannot work, with the command's option.
    """

    world: int
    seqlen: int
    layers: int
    width: int
    heads: int
    dtype: str
    network: float
    repeats: int

    def __post_init__(self) -> None:
        for name, least in (
            ("world", 2),
            ("seqlen", 2 * self.world),
            ("layers", 2),
            ("width", 1),
            ("heads", 1),
            ("repeats", LEAST_REPEATS),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name} {value} is less than {least}; choose {least} or more")
        if self.width % self.heads:
            raise ConfigError(
                f"--width {self.width} is no multiple of --heads {self.heads}; choose one that is"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is unknown; use one of {sorted(DTYPES)}")
        if not 0 < self.network < float("inf"):
            raise ConfigError(f"--network {self.network} is no rate; choose Gbit/s above 0")
