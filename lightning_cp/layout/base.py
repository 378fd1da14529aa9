"""The layout value: an ordered list of spans of global positions for every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_cp.errors import ConfigError
from lightning_cp.spans import Piece, Spans, pieces, total, union


@dataclass(frozen=True, slots=True)
class Layout:
    """Which global positions of a sequence each rank holds, in its local order.

    Args:
        length: number of positions of the whole sequence.
        spans: for every rank its half-open spans of global positions, in local order. Sizes may
            differ by rank and a rank may hold nothing; every position is held exactly once.

    Raises:
        ConfigError: if the spans are not a partition of `0..length`.
    """

    length: int
    spans: tuple[Spans, ...]

    def __post_init__(self) -> None:
        held = [span for rank_spans in self.spans for span in rank_spans]
        whole = ((0, self.length),) if self.length else ()
        if any(start >= stop for start, stop in held) or (
            union(held) != whole or total(held) != self.length
        ):
            raise ConfigError(
                f"a layout must hold every position of 0..{self.length} exactly once in spans "
                f"(start, stop) with start < stop; got {self.spans}"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of every rank."""
        return tuple(total(rank_spans) for rank_spans in self.spans)

    def size(self, rank: int) -> int:
        """Number of positions that `rank` holds."""
        return total(self.spans[rank])

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The spans of `rank` with their local rows, sorted by global position."""
        return _pieces(self.spans[rank])

    def positions(self, rank: int) -> Tensor:
        """Global positions of the tokens of `rank`, in local order: int64 `[size(rank)]`."""
        ranges = [torch.arange(start, stop) for start, stop in self.spans[rank]]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def shard(self, tensor: Tensor, *, rank: int, dim: int) -> Tensor:
        """Cut the part of `rank` out of a whole tensor; differentiable, always a new tensor.

        Args:
            tensor: any dtype, `tensor.shape[dim] == length`.
            rank: rank within the context-parallel group.
            dim: the sequence dimension.

        Returns:
            The same shape with `size(rank)` at `dim`.

        Raises:
            ConfigError: if the size at `dim` is not `length`.
        """
        if tensor.shape[dim] != self.length:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} has {tensor.shape[dim]} positions at "
                f"dim {dim}; this layout holds {self.length}; "
                f"pad the tensor to the layout's length first"
            )
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self.spans[rank]]
        return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0).clone()

    def unshard(self, shards: Sequence[Tensor], *, dim: int) -> Tensor:
        """Put the shards of all ranks (in rank order) back into one tensor in global order.

        Args:
            shards: one tensor per rank with `size(rank)` at `dim`.
            dim: the sequence dimension.

        Returns:
            A tensor with `length` at `dim`; differentiable.

        Raises:
            ConfigError: if the number of shards or a size is not this layout's.
        """
        found = tuple(shard.shape[dim] for shard in shards)
        if found != self.sizes:
            raise ConfigError(
                f"shards of sizes {found} at dim {dim}; this layout has "
                f"{self.sizes}; pass the shards of all ranks, in rank order"
            )
        placed = sorted((piece, rank) for rank in range(self.world) for piece in self.pieces(rank))
        if not placed:
            return shards[0].clone()
        return torch.cat(
            [
                shards[rank].narrow(dim, piece.row, piece.stop - piece.start)
                for piece, rank in placed
            ],
            dim,
        )


@lru_cache(maxsize=4096)
def _pieces(spans: Spans) -> tuple[Piece, ...]:
    return pieces(spans)
