"""Packing rows of keys and values into one message per peer, and placing what arrives.

Legend: B batch, H key heads, S local rows, N rows of a buffer, D head size.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.p2p import exchange
from lightning_cp.plan import Plan, Round, Transfer
from lightning_cp.spans import Spans

Pair = tuple[Tensor, Tensor]
"""Keys `[B, H, S, D]` and values `[B, H, S, Dv]`, or their gradients."""


class Incoming:
    """Messages of one round on their way; `wait` gives the buffer they fill."""

    def __init__(self, step: Round, source: Pair, group: Any) -> None:
        sends = [(t.peer, _pack(source, t.rows)) for t in step.sends]
        self._size, self._like = step.size, source
        self._parts, receives = _receivers(step.receives, source)
        self._pending = exchange(sends, receives, group=group)

    def wait(self) -> Pair:
        """Keys and values of the round, `[B, H, N, D]` and `[B, H, N, Dv]`."""
        self._pending.wait()
        if len(self._parts) == 1 and self._parts[0][0] == ((0, self._size),):
            return self._parts[0][1]
        k, v = (x.new_empty(*x.shape[:2], self._size, x.shape[3]) for x in self._like)
        for rows, (k_part, v_part) in self._parts:
            _scatter(k, k_part, rows, add=False)
            _scatter(v, v_part, rows, add=False)
        return k, v


class Homing:
    """Gradients of a round's buffer on their way to the ranks that own the rows.

    Args:
        step: the round.
        grads: gradients of its buffer.
        own: gradients of the own shard, to which `add` adds what arrives.
        group: process group of the exchange.
    """

    def __init__(self, step: Round, grads: Pair, own: Pair, *, group: Any) -> None:
        sends = [(t.peer, _pack(grads, t.rows)) for t in step.returns]
        self._own = own
        self._parts, receives = _receivers(step.collects, own)
        self._pending = exchange(sends, receives, group=group)

    def add(self) -> None:
        """Wait for the messages and add what arrived."""
        self._pending.wait()
        for rows, parts in self._parts:
            for total, part in zip(self._own, parts, strict=True):
                _scatter(total, part, rows, add=True)


def rounds(plan: Plan, k: Tensor, v: Tensor, *, group: Any) -> Iterator[tuple[Round, Pair]]:
    """Every round of a plan with the keys and values that its tiles read.

    The messages of a round are posted before the tiles of the round before it are computed.
    """
    incoming: Incoming | None = None
    buffer = (k, v)
    for step, following in zip_longest(plan.rounds, plan.rounds[1:]):
        if incoming is not None:
            buffer = incoming.wait()
        if following is not None:
            incoming = Incoming(following, buffer if following.relay else (k, v), group)
        yield step, buffer


def _receivers(
    transfers: tuple[Transfer, ...], like: Pair
) -> tuple[list[tuple[Spans, Pair]], list[tuple[int, Tensor]]]:
    parts, messages = [], []
    for transfer in transfers:
        flat, pair = _message(like, transfer.size)
        parts.append((transfer.rows, pair))
        messages.append((transfer.peer, flat))
    return parts, messages


def _message(like: Pair, size: int) -> tuple[Tensor, Pair]:
    """One flat buffer for `size` rows, and its two halves shaped as keys and values."""
    shapes = [(*x.shape[:2], size, x.shape[3]) for x in like]
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = like[0].new_empty(sum(counts))
    k, v = (part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True))
    return flat, (k, v)


def _pack(source: Pair, rows: Spans) -> Tensor:
    flat, pair = _message(source, sum(stop - start for start, stop in rows))
    for packed, x in zip(pair, source, strict=True):
        at = 0
        for start, stop in rows:
            packed[:, :, at : at + stop - start].copy_(x[:, :, start:stop])
            at += stop - start
    return flat


def _scatter(target: Tensor, packed: Tensor, rows: Spans, *, add: bool) -> None:
    at = 0
    for start, stop in rows:
        part = packed[:, :, at : at + stop - start]
        view = target[:, :, start:stop]
        view.add_(part) if add else view.copy_(part)
        at += stop - start
