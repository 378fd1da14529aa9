"""Flash attention on CUDA through torch's own operators: all tiles of a round in a few calls.

Legend: B batch, H heads, S rows, N rows of all sequences of a call, D head size.

[Note: varlen operators] `aten::_flash_attention_forward` and `_backward` with cumulative lengths
take every tile as a sequence of its own. Causality and windows are aligned at the bottom right of
each, as tiles are. Fewer key heads than query heads are fine; the head size must be a multiple of 8
and the same for keys and values, so tensors are padded with zeros. The LSE is `[H, N]`, float. The
backward takes the output and LSE over all keys with some of the keys, which makes a sum over tiles
exact; `rng_state` and `unused` are read with dropout only. dq, dk and dv come in the dtype of the
inputs. It computes its row sums from the output in that dtype, as on one device.

[Note: private operators] `torch.nn.attention.varlen.varlen_attn` is public, but has no backward
for a given LSE, which parts of the keys need, and its arguments moved: torch 2.13 refuses fewer key
heads without `enable_gqa`, which 2.11 does not know. What is used here of the two operators is the
same from 2.11 to 2.13 (tests pin it), and `activate_flash_attention_impl` of torch puts newer flash
attention behind the same names.

[Note: windows and short keys] The kernel takes a window as wide as `max_k` for no window, which is
right only where no sequence has more rows than `max_k`: its first row stands before the first key.
So `max_k` is at least the largest number of rows; the kernel takes it for a bound only. `max_q` is
at least 2: with 1 and fewer key heads than query heads it would take a path meant for decoding.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.kernels.base import Gradients, Kernel, Part, Saved
from lightning_cp.kernels.cuda import HALF, aligned, too_old, unfit, width
from lightning_cp.kernels.packing import (
    CAUSAL,
    FULL,
    Pack,
    adjoining,
    cumulative,
    indices,
    packs,
    runs,
    unpacked,
)
from lightning_cp.plan import Tile
from lightning_cp.spans import Spans

LARGEST = 256
"""Largest head size of the kernel."""

KEPT = 64
"""How many tensors of lengths and of row numbers stay on the device: those of the last plans."""


class Call(NamedTuple):
    """Where the rows of a pack lie among all tokens, and what its call is told of them."""

    q: Spans
    k: Spans
    cum_q: Tensor
    cum_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    left: int | None
    right: int | None


class Flash(Kernel):
    """`aten::_flash_attention_forward` and its backward; see the notes of the module."""

    def __init__(self) -> None:
        self._cumulative = lru_cache(KEPT)(cumulative)
        self._indices = lru_cache(KEPT)(indices)

    def rejects(self, q: Tensor, v: Tensor) -> str | None:
        """See `Kernel.rejects`."""
        if reason := unfit(q, HALF):
            return reason
        if (size := max(q.shape[-1], v.shape[-1])) > LARGEST:
            return f"takes heads of at most {LARGEST}, got {size}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "is not part of this build of torch"
        return too_old(q.device, (8, 0))

    def forward(
        self, tiles: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Part]:
        """See `Kernel.forward`; neighbouring rows of a pack are one part."""
        if not tiles:
            return
        size = width(q.shape[-1], v.shape[-1])
        rows, keys, values = (_tokens(x, size) for x in (q, k, v))
        for pack in packs(tiles):
            call = self._call(pack, q, k)
            taken = self._take(rows, call.q), self._take(keys, call.k), self._take(values, call.k)
            out, lse = self._run(call, *taken, scale=scale)
            copies = q.shape[0] if pack.shared else 1
            out = unpacked(out[..., : v.shape[-1]], copies)
            lse = lse.unflatten(1, (copies, -1)).transpose(0, 1)
            at = 0
            for tile in runs(pack.tiles, keys=False):
                stop = at + tile.q[1] - tile.q[0]
                yield Part(tile, out[:, :, at:stop], lse[:, :, at:stop])
                at = stop

    def backward(
        self, tiles: Sequence[Tile], saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> Iterator[Gradients]:
        """See `Kernel.backward`; tiles whose rows and keys adjoin come together."""
        if not tiles:
            return
        q, head = saved.q, (saved.q.shape[-1], v.shape[-1])
        size = width(*head)
        rows, out, grad, keys, values = (
            _tokens(x, size) for x in (q, saved.out, saved.grad_out, k, v)
        )
        lse = saved.lse.transpose(0, 1).flatten(1)
        for pack in packs(tiles):
            call = self._call(pack, q, k)
            taken = Saved(
                self._take(rows, call.q),
                self._take(out, call.q),
                self._take(lse, call.q, dim=1).contiguous(),
                self._take(grad, call.q),
            )
            sources = self._take(keys, call.k), self._take(values, call.k)
            grads = self._run_backward(call, taken, *sources, scale=scale)
            copies = q.shape[0] if pack.shared else 1
            dq, dk, dv = (unpacked(x, copies) for x in grads)
            yield from _gradients(pack, dq[..., : head[0]], dk[..., : head[0]], dv[..., : head[1]])

    def _run(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output `[N, H, D]` and LSE `[H, N]` of all sequences of a call."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
            *(q, k, v, call.cum_q, call.cum_k, call.max_q, call.max_k),
            0.0,
            call.causal,
            False,
            scale=scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return out, lse

    def _run_backward(
        self, call: Call, saved: Saved, k: Tensor, v: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of all sequences of a call, given the output and LSE over all keys."""
        q, out, lse, grad = saved
        state = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward.default(
            *(grad, q, k, v, out, lse, call.cum_q, call.cum_k, call.max_q, call.max_k),
            0.0,
            call.causal,
            *state,
            scale=scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return found

    def _call(self, pack: Pack, q: Tensor, k: Tensor) -> Call:
        """What a call is told of a pack; see [Note: windows and short keys]."""
        batch, device = q.shape[0], q.device
        sequences = list(pack.sequences(batch))
        q_spans = tuple(_shifted(row * q.shape[2], tile.q) for row, tile in sequences)
        k_spans = tuple(_shifted(row * k.shape[2], tile.k) for row, tile in sequences)
        max_q = max(stop - start for start, stop in q_spans)
        max_k = max(stop - start for start, stop in k_spans)
        banded = pack.window not in (FULL, CAUSAL)
        left, right = pack.window if banded else (None, None)
        return Call(
            q_spans,
            k_spans,
            self._cumulative(_at_zero(q_spans), device),
            self._cumulative(_at_zero(k_spans), device),
            max(max_q, 2),
            max(max_q, max_k) if banded else max_k,
            pack.window == CAUSAL,
            left,
            right,
        )

    def _take(self, x: Tensor, spans: Spans, dim: int = 0) -> Tensor:
        """Rows of a tensor of tokens: a slice where they adjoin, else a copy."""
        if adjoining(spans):
            return x.narrow(dim, spans[0][0], spans[-1][1] - spans[0][0])
        return x.index_select(dim, self._indices(spans, x.device))


def _tokens(x: Tensor, size: int) -> Tensor:
    """`[B, H, S, D]` as tokens `[B * S, H, size]`, without a copy where strides allow it."""
    return aligned(x.transpose(1, 2), size).flatten(0, 1)


def _shifted(offset: int, span: tuple[int, int]) -> tuple[int, int]:
    return offset + span[0], offset + span[1]


def _at_zero(spans: Spans) -> Spans:
    """The spans with their lengths only, so that equal lengths share one tensor."""
    return tuple((0, stop - start) for start, stop in spans)


def _gradients(pack: Pack, dq: Tensor, dk: Tensor, dv: Tensor) -> Iterator[Gradients]:
    at, key = 0, 0
    for tile in runs(pack.tiles, keys=True):
        stop, end = at + tile.q[1] - tile.q[0], key + tile.k[1] - tile.k[0]
        yield Gradients(tile, dq[:, :, at:stop], dk[:, :, key:end], dv[:, :, key:end])
        at, key = stop, end
