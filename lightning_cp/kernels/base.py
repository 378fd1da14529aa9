"""What a kernel is."""

from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_cp.plan import Tile


class Saved(NamedTuple):
    """Query rows with the global results that their backward needs.

    Shapes: `q`, `out`, `grad_out` `[B, H, Sq, D]`, `lse` `[B, H, Sq]` float.
    """

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor


class Kernel(Protocol):
    """Attention over one tile: plain device code, no ranks, no global positions."""

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """Why these tensors are not supported (a verb phrase), or None."""
        ...

    def split(self, tile: Tile) -> tuple[Tile, ...]:
        """The tile as blocks that the kernel can run."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention of one block.

        Args:
            q: `[B, H, Sq, D]`.
            k: `[B, Hk, Sk, D]`, `H` a multiple of `Hk`.
            v: `[B, Hk, Sk, Dv]`.
            is_causal: aligned at the bottom right corner, `Sk >= Sq`.
            scale: factor on the scores.

        Returns:
            Output `[B, H, Sq, Dv]` and natural-log LSE `[B, H, Sq]` in float (double for double).
        """
        ...

    def backward(
        self, saved: Saved, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, dk and dv, given the output and LSE over all blocks."""
        ...
