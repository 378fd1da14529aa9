"""Sizes of the parallel axes and the rank arithmetic between them (integers only)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from lightning_cp.errors import ConfigError

Size = int | Literal["auto"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the grid, the outermost first."""


class Coordinates(NamedTuple):
    """Where a global rank sits: its index on the data, context, tensor and pipeline axes."""

    dp: int
    cp: int
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A grid of ranks in which `dp` virtual devices of `cp * tp` ranks hold samples of their own.

    Of the axes `AXES` the last one is the innermost: the ranks of a tensor-parallel group are
    neighbours, then those of a context-parallel group (on one node where the sizes divide the
    number of its devices).

    Attributes:
        dp: virtual devices.
        cp: ranks that share each sequence.
        dp_replicate: groups of virtual devices that hold equal parts of the parameters; `dp` is a
            multiple of it.
        tp: ranks that share each layer.
        pp: stages of a pipeline.

    Raises:
        ConfigError: if a size is below 1, or `dp_replicate` does not divide `dp`.
    """

    dp: int
    cp: int
    dp_replicate: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, size in (
            ("data_parallel_size", self.dp),
            ("context_parallel_size", self.cp),
            ("data_parallel_replicate_size", self.dp_replicate),
            ("tensor_parallel_size", self.tp),
            ("pipeline_parallel_size", self.pp),
        ):
            _check_size(name, size)
        if self.dp % self.dp_replicate:
            raise ConfigError(
                f"data_parallel_replicate_size={self.dp_replicate} does not divide "
                f"data_parallel_size={self.dp}, the number of virtual devices, of which every "
                f"replica has an equal share; use one of {_divisors(self.dp)}"
            )

    @classmethod
    def resolve(
        cls,
        *,
        world: int,
        local_world: int,
        cp: Size = "auto",
        dp: Size = "auto",
        dp_replicate: int = 1,
        tp: int = 1,
    ) -> "Topology":
        """Resolve sizes given by the user, `"auto"` included, for `world` ranks.

        `cp="auto"` takes what `dp` and `tp` leave over; with both automatic, one context-parallel
        group and its `tp` are all `local_world` ranks of a node.

        Raises:
            ConfigError: if a size is below 1, larger than the world, or does not divide it.
        """
        for name, size in (
            ("tensor_parallel_size", tp),
            ("data_parallel_replicate_size", dp_replicate),
        ):
            _check_size(name, size)
        rest = _Rest(world, 1).quotient("tensor_parallel_size", tp)
        left = _Rest(rest, tp)
        if cp == "auto":
            node = max(local_world // tp, 1)
            cp = node if dp == "auto" else left.quotient("data_parallel_size", dp)
        quotient = left.quotient("context_parallel_size", cp)
        topology = cls(dp=quotient if dp == "auto" else dp, cp=cp, dp_replicate=dp_replicate, tp=tp)
        if topology.world != world:
            third = f" x tensor_parallel_size={tp}" if tp > 1 else ""
            raise ConfigError(
                f"data_parallel_size={topology.dp} x context_parallel_size={topology.cp}{third} = "
                f"{topology.world} ranks, but the job has {world}: the product must be the number "
                f"of processes; with context_parallel_size={topology.cp} use "
                f"data_parallel_size={quotient} or 'auto'"
            )
        return topology

    @property
    def dp_shard(self) -> int:
        """Virtual devices of one replica, whose ranks hold different parts of the parameters."""
        return self.dp // self.dp_replicate

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def averaged(self) -> int:
        """Number of ranks over which the gradient of a parameter is averaged."""
        return self.dp * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(dp=dp, cp=cp, tp=tp, pp=pp)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The global ranks in groups whose members differ in their index on `axes` alone.

        Args:
            axes: of `AXES`.

        Returns:
            The groups in the order of their first ranks, each in ascending order.
        """
        sizes = [getattr(self, axis) for axis in AXES]
        strides = [prod(sizes[number + 1 :]) for number in range(len(AXES))]

        def offsets(moving: bool) -> Iterator[int]:
            ranges = [
                range(size if (axis in axes) == moving else 1)
                for axis, size in zip(AXES, sizes, strict=True)
            ]
            for place in product(*ranges):
                yield sum(index * stride for index, stride in zip(place, strides, strict=True))

        members = tuple(offsets(True))
        return tuple(tuple(first + member for member in members) for first in offsets(False))


class _Rest(NamedTuple):
    """Processes to be divided, and the size of the tensor-parallel groups that they stand for."""

    processes: int
    tp: int

    def quotient(self, name: str, size: object) -> int:
        number = _check_size(name, size)
        if self.processes % number:
            left = f" of {self.tp} (tensor_parallel_size)" if self.tp > 1 else ""
            kind = "groups" if self.tp > 1 else "processes"
            raise ConfigError(
                f"{name}={size} does not divide the {self.processes} {kind}{left} of this job; "
                f"use one of {_divisors(self.processes)}, or start another number of processes"
            )
        return self.processes // number


def _check_size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        automatic = ", or 'auto'" if name in ("context_parallel_size", "data_parallel_size") else ""
        raise ConfigError(f"{name}={size!r}: a size must be an integer of 1 or more{automatic}")
    return size


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
