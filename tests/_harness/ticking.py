"""A clock that only a kernel moves, for checks of what is timed."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_cp.kernels import KERNELS, Kernel
from lightning_cp.kernels.base import Gradients, Part, Saved
from lightning_cp.plan import Tile


class Ticking(Kernel):
    """Right results; tiles take time by a formula, forward as much as backward.

    Args:
        pair: seconds for a visible pair of a head.
        key: seconds of a tile for a key of a head that a query sees on average.
    """

    def __init__(self, *, pair: float, key: float = 0.0) -> None:
        self.now = 0.0
        self._pair, self._key = pair, key

    def clock(self) -> float:
        """Seconds since the kernel was made."""
        return self.now

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        return None

    def forward(
        self, tiles: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Part]:
        """See `Kernel.forward`."""
        for tile in tiles:
            self._tick(tile, q.shape[1])
            yield from KERNELS["reference"].forward([tile], q, k, v, scale=scale)

    def backward(
        self, tiles: Sequence[Tile], saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Gradients]:
        """See `Kernel.backward`."""
        for tile in tiles:
            self._tick(tile, saved.q.shape[1])
            yield from KERNELS["reference"].backward([tile], saved, k, v, scale=scale)

    def _tick(self, tile: Tile, heads: int) -> None:
        keys = tile.pairs / (tile.q[1] - tile.q[0])
        self.now += heads * (self._pair * tile.pairs + self._key * keys)
