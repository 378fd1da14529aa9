"""Sizes of the parallel axes and the rank arithmetic between them (integers only)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_cp.errors import ConfigError

Size = int | Literal["auto"]


class Coordinates(NamedTuple):
    """Where a global rank sits: its index on the data axis and on the context axis."""

    dp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A grid of `dp` virtual devices, each made of `cp` ranks; `cp` is the inner axis.

    Global rank = dp_index * cp + cp_index, so that the ranks of one context-parallel group are
    neighbours (on one node where `cp` divides the number of devices of a node).

    Raises:
        ConfigError: if a size is below 1.
    """

    dp: int
    cp: int

    def __post_init__(self) -> None:
        for name, size in (
            ("data_parallel_size", self.dp),
            ("context_parallel_size", self.cp),
        ):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"{name}={size!r}: a size must be an integer of 1 or more, or 'auto'"
                )

    @classmethod
    def resolve(
        cls, *, world: int, local_world: int, cp: Size = "auto", dp: Size = "auto"
    ) -> "Topology":
        """Resolve sizes given by the user, `"auto"` included, for `world` ranks.

        `cp="auto"` takes what `dp` leaves over; with both automatic, one context-parallel group
        is all `local_world` ranks of a node.

        Raises:
            ConfigError: if a size is below 1, larger than the world, or does not divide it.
        """
        if cp == "auto":
            cp = local_world if dp == "auto" else cls._quotient(world, "data_parallel_size", dp)
        quotient = cls._quotient(world, "context_parallel_size", cp)
        topology = cls(dp=quotient if dp == "auto" else dp, cp=cp)
        if topology.world != world:
            raise ConfigError(
                f"data_parallel_size={topology.dp} x context_parallel_size={topology.cp} = "
                f"{topology.world} ranks, but the job has {world}: the product must be the number "
                f"of processes; with context_parallel_size={topology.cp} use "
                f"data_parallel_size={quotient} or 'auto'"
            )
        return topology

    @staticmethod
    def _quotient(world: int, name: str, size: int) -> int:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}={size!r}: a size must be an integer of 1 or more, or 'auto'")
        if world % size:
            allowed = [n for n in range(1, world + 1) if world % n == 0]
            raise ConfigError(
                f"{name}={size} does not divide the {world} processes of this job; "
                f"use one of {allowed}, or start another number of processes"
            )
        return world // size

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`."""
        return Coordinates(*divmod(rank, self.cp))

    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks of every context-parallel group, in the order of the data axis."""
        return tuple(
            tuple(range(first, first + self.cp)) for first in range(0, self.world, self.cp)
        )

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks with one index on the context axis, in the order of that axis."""
        return tuple(tuple(range(first, self.world, self.cp)) for first in range(self.cp))
