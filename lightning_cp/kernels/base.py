"""What a kernel is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, TypeVar

from torch import Tensor

from lightning_cp.kernels.scores import PLAIN, Scores
from lightning_cp.plan import Tile
from lightning_cp.spans import Span, Spans

K = TypeVar("K", bound="Kernel")


class Saved(NamedTuple):
    """Query rows with the global results that their backward needs.

    Shapes: `q`, `out`, `grad_out` `[B, H, Sq, D]`, `lse` `[B, H, Sq]` float.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor


class Part(NamedTuple):
    """Attention of some query rows over some of their keys.

    Attributes:
        tile: the query rows and the batch row; of a kernel that joins tiles nothing else.
        out: `[B, H, Sq, Dv]`, any float dtype.
        lse: `[B, H, Sq]` float (double for double), natural logarithm.
    """

    tile: Tile
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """What one tile, or tiles joined, add to the gradients of their rows `tile.q` and `tile.k`."""

    tile: Tile
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Kernel(ABC):
    """Attention over tiles of one buffer: plain device code, no ranks.

    Attributes:
        supports: names of the terms of scores that it computes, see `Scores.terms`.
        scores: those of the call that it was made for; only then it knows global positions.
    """

    supports: frozenset[str] = frozenset()
    scores: Scores = PLAIN

    @abstractmethod
    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """Why these tensors are not supported (a verb phrase), or None."""

    def lacks(self, scores: Scores) -> str | None:
        """Which terms of scores it does not compute (a verb phrase), or None."""
        missing = sorted(scores.terms - self.supports)
        return f"computes no {', no '.join(missing)}" if missing else None

    def bound(self: K, scores: Scores) -> K:
        """This kernel, made for the scores of a call."""
        if scores is self.scores:
            return self
        made = copy(self)
        made.scores = scores
        return made

    def part(self: K, heads: slice, queries: Spans, keys: Spans) -> K:
        """This kernel for some of the query heads of its call, and rows of these positions."""
        if self.scores is PLAIN:
            return self
        return self.bound(self.scores.of(heads).at(queries, keys))

    @abstractmethod
    def forward(
        self, tiles: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Part]:
        """Softmax attention of every tile on its own, in parts that together are the tiles.

        Args:
            tiles: what to compute; rows count in `q` and in `k` and `v`.
            q: `[B, H, Sq, D]`.
            k: `[B, Hk, Sk, D]`, `H` a multiple of `Hk`.
            v: `[B, Hk, Sk, Dv]`.
            scale: factor on the scores.
        """

    @abstractmethod
    def backward(
        self, tiles: Sequence[Tile], saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Gradients]:
        """Each tile's part of dq, dk and dv, given the output and LSE over all keys."""


class BlockKernel(Kernel):
    """A kernel that computes one block at a time."""

    @abstractmethod
    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """The tile as blocks that the kernel can run."""

    @abstractmethod
    def block(
        self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of one block, see `Part`; the tensors hold just its rows."""

    @abstractmethod
    def block_backward(
        self, tile: Tile, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One block's part of dq, dk and dv; the tensors hold just its rows."""

    def forward(
        self, tiles: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Part]:
        """See `Kernel.forward`."""
        for tile in (block for whole in tiles for block in self.split(whole)):
            rows = cut(q, tile.row, tile.q), cut(k, tile.row, tile.k), cut(v, tile.row, tile.k)
            yield Part(tile, *self.block(tile, *rows, scale=scale))

    def backward(
        self, tiles: Sequence[Tile], saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Gradients]:
        """See `Kernel.backward`."""
        for tile in (block for whole in tiles for block in self.split(whole)):
            rows = Saved(*(cut(x, tile.row, tile.q) for x in saved))
            keys = cut(k, tile.row, tile.k), cut(v, tile.row, tile.k)
            yield Gradients(tile, *self.block_backward(tile, rows, *keys, scale=scale))


def cut(x: Tensor, row: int | None, span: Span) -> Tensor:
    """Rows `span` of dimension 2, of one batch row or of all."""
    batch = x if row is None else x[row : row + 1]
    return batch[:, :, span[0] : span[1]]
