"""What a step is predicted to take: a few constants of a machine and a model."""

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from lightning_cp.balance.problem import Loads
from lightning_cp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one transformer layer, forward and backward, on one rank.

    The defaults are those of a layer of width 4096 with grouped queries (4 to 1) on an accelerator
    that does 350 Tflop/s in attention, with a link of 40 GB/s: a token costs as much as 16384
    pairs, a received key as much as 702.

    Attributes:
        pair: seconds for one visible (query, key) pair, all heads together.
        token: seconds for what every token costs: the linear layers.
        tile: a piece of a document costs as much as if it had so many queries more, because short
            tiles do not fill a kernel.
        key_bytes: bytes that travel for a key and its value that another rank holds: there in the
            forward and in the backward, and their gradient back.
        bandwidth: of a rank's link, bytes per second.
        latency: seconds for one message.

    Raises:
        ConfigError: if one is negative or no number, or there is no bandwidth.
    """

    pair: float = 1.64e-10
    token: float = 2.687e-6
    tile: float = 24.0
    key_bytes: float = 4605.0
    bandwidth: float = 40e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < float("inf")) or (name == "bandwidth" and not value):
                raise ConfigError(
                    f"{name}={value!r} of a cost model must be a finite number that is not "
                    f"negative, and the bandwidth more than 0"
                )

    def compute(self, loads: Loads) -> list[float]:
        """Seconds that every rank computes."""
        return [
            self.pair * (work + self.tile * keys) + self.token * tokens
            for work, keys, tokens in zip(loads.work, loads.keys, loads.tokens, strict=True)
        ]

    def links(self, loads: Loads) -> list[float]:
        """Seconds that every rank's link is busy; one message from every other rank.

        A key and its value come to the rank that reads them, twice, and their gradient to the rank
        that holds them: half of their bytes each, in a precision of two bytes.
        """
        messages = len(loads.received) - 1
        return [
            self.key_bytes * keys / 2 / self.bandwidth + self.latency * messages if keys else 0.0
            for keys in map(sum, zip(loads.received, loads.served, strict=True))
        ]

    def attention(self, loads: Loads) -> float:
        """Seconds of the slowest rank's attention, where messages travel before tiles are computed.

        Latency is left out, as the same for every plan.
        """
        key = self.key_bytes / 2 / self.bandwidth
        return max(
            self.pair * (work + self.tile * keys) + key * (received + served)
            for work, keys, received, served in zip(
                loads.work, loads.keys, loads.received, loads.served, strict=True
            )
        )

    def step(self, loads: Loads, *, overlap: bool = True) -> float:
        """Seconds of the slowest rank.

        Args:
            loads: what the ranks do.
            overlap: messages travel while tiles are computed, so that the longer of the two
                counts; else their sum.
        """
        both = zip(self.compute(loads), self.links(loads), strict=True)
        return max((max(pair) if overlap else sum(pair) for pair in both), default=0.0)

    def save(self, path: str | Path) -> None:
        """Write the constants as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """Read the constants from JSON; those that are missing have their default.

        Raises:
            ConfigError: if the file cannot be read, or holds anything else.
        """
        names = [field.name for field in fields(cls)]
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the cost model {path} cannot be read: {error}; "
                f"lightning-cp bench calibrate --json FILE writes one"
            ) from error
        if not isinstance(found, dict) or not set(found) <= set(names):
            raise ConfigError(
                f"the cost model {path} must be a JSON object with some of the numbers "
                f"{', '.join(names)}"
            )
        return cls(**found)


@lru_cache(maxsize=16)
def cost_model(path: str) -> CostModel:
    """The cost model of a file, read once."""
    return CostModel.load(path)
