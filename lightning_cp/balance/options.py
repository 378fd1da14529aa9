"""The options of the balanced layout."""

from dataclasses import dataclass, fields
from math import fsum
from typing import Any, ClassVar

from lightning_cp.balance.cost import CostModel, cost_model
from lightning_cp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """Layout for packed rows: even work and even tokens, and as few keys as possible that travel.

    Args:
        work_cap: greatest attention work of a rank over its share, a hard cap.
        token_cap: greatest number of tokens of a rank over its share, a hard cap.
        min_piece: least tokens of a piece of a document that is cut; given up before a cap.
        align: documents are cut at multiples of this from their first token, where neither a cap
            nor even work needs a finer cut: kernels compute in tiles.
        rank_speed: how fast every rank of the group is, in any unit; work and tokens are shared
            accordingly. All alike where not given.
        cost_file: JSON file of a `CostModel`, the same for every rank; the plan that keeps the
            caps is then chosen by the predicted time of a step. Without one, a plan is chosen whose
            slowest rank has its attention done soon, among those that make about the least travel.

    Raises:
        ConfigError: if a value is out of range, or the file cannot be read.
    """

    work_cap: float = 1.03
    token_cap: float = 1.05
    min_piece: int = 256
    align: int = 128
    rank_speed: tuple[float, ...] | None = None
    cost_file: str | None = None
    name: ClassVar[str] = "balanced"

    def __post_init__(self) -> None:
        for name in ("work_cap", "token_cap"):
            cap = getattr(self, name)
            if not (_is_number(cap) and 1 <= cap < float("inf")):
                raise ConfigError(
                    f"{name}={cap!r} must be a number of at least 1: the most that a rank may have "
                    f"over its share, for example 1.03 for 3 percent more"
                )
        for name in ("min_piece", "align"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r} must be a positive number of tokens")
        if self.rank_speed is not None:
            speed = self.rank_speed
            if not isinstance(speed, list | tuple) or not all(
                _is_number(x) and 0 < x < float("inf") for x in speed
            ):
                raise ConfigError(
                    f"rank_speed={speed!r} must be one positive number for every rank of the "
                    f"group, for example (1.0, 1.0, 0.5, 0.5)"
                )
            object.__setattr__(self, "rank_speed", tuple(map(float, speed)))
        self.cost()

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        shown = [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]
        return f"Balanced({', '.join(shown)})"

    def cost(self) -> CostModel | None:
        """The cost model of the file, None without one.

        Raises:
            ConfigError: if the file cannot be read.
        """
        return None if self.cost_file is None else cost_model(self.cost_file)

    def shares(self, world: int) -> tuple[float, ...]:
        """The part of a row that every rank should have.

        Raises:
            ConfigError: if there are speeds for another number of ranks.
        """
        speed = self.rank_speed or (1.0,) * world
        if len(speed) != world:
            raise ConfigError(
                f"rank_speed has {len(speed)} speeds, the context-parallel group has {world} "
                f"ranks; give one speed for every rank of the group, in order"
            )
        return tuple(x / fsum(speed) for x in speed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
