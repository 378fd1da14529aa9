"""Packing rows of keys and values into one message per peer, and placing what arrives.

Legend: B batch, H key heads of a group, S local rows, N rows of a buffer, D head size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.p2p import Link, Waiting
from lightning_cp.exchange.probe import Probe
from lightning_cp.exchange.running import RunningSum
from lightning_cp.plan import Plan, Round, Transfer
from lightning_cp.spans import Spans


class Pair(NamedTuple):
    """Keys `[B, H, N, D]` and values `[B, H, N, Dv]`, or their gradients.

    Attributes:
        flat: the one buffer of both, keys first, where they have one.
    """

    k: Tensor
    v: Tensor
    flat: Tensor | None = None


class Fetch:
    """Keys and values of all rounds but the local ones, always one round ahead.

    Args:
        plan: this rank's plan.
        groups: the own keys and values of every group of heads.
        link: what carries the messages.
        probe: is told of the phases.
    """

    def __init__(self, plan: Plan, groups: Sequence[Pair], link: Link, probe: Probe) -> None:
        self._link, self._probe = link, probe
        self._todo: Iterator[tuple[Pair, Round]] = (
            (own, step) for own in groups for step in plan.rounds[1:]
        )
        self._incoming: _Incoming | None = None

    def post(self, before: Pair | None = None) -> None:
        """Post the messages of the next round, if there is one; `before` is the last buffer."""
        self._incoming = None
        for own, step in self._todo:
            source = before if step.relay and before is not None else own
            self._incoming = _Incoming(step, source, self._link, self._probe)
            return

    @property
    def pending(self) -> Waiting:
        """The messages of the round that was posted last."""
        assert self._incoming is not None  # invariant: posted one round ahead
        return self._incoming.pending

    def wait(self) -> Pair:
        """The buffer of the round that was posted last."""
        assert self._incoming is not None  # invariant: posted one round ahead
        incoming, self._incoming = self._incoming, None
        return incoming.wait()


class _Incoming:
    """Messages of one round on their way."""

    def __init__(self, step: Round, source: Pair, link: Link, probe: Probe) -> None:
        self._size, self._like, self._probe = step.size, source, probe
        with probe("copy"):
            sends = [(t.peer, _packed(source, t.rows, source.k.dtype)) for t in step.sends]
        self._parts = [(t.rows, empty_pair(source, t.size)) for t in step.receives]
        with probe("communication"):
            self.pending = link.exchange(sends, _messages(step.receives, self._parts))

    def wait(self) -> Pair:
        """Keys and values of the round."""
        with self._probe("communication"):
            self.pending.wait()
        del self.pending
        if len(self._parts) == 1 and self._parts[0][0] == ((0, self._size),):
            return self._parts[0][1]
        with self._probe("copy"):
            whole = empty_pair(self._like, self._size)
            while self._parts:
                rows, part = self._parts.pop()
                _place(whole.k, part.k, rows)
                _place(whole.v, part.v, rows)
        return whole


class Homing:
    """Gradients of a round's buffer on their way to the ranks that own the rows.

    Args:
        step: the round.
        grads: gradients of its buffer, whole.
        own: gradients of the own keys and values, to which `add` adds what arrives.
        wire: dtype in which they travel.
        link: what carries the messages.
        probe: is told of the phases.
    """

    def __init__(
        self,
        step: Round,
        grads: Pair,
        own: tuple[RunningSum, RunningSum],
        *,
        wire: torch.dtype,
        link: Link,
        probe: Probe,
    ) -> None:
        self._own, self._probe = own, probe
        with probe("copy"):
            sends = [(t.peer, _packed(grads, t.rows, wire)) for t in step.returns]
        like = Pair(own[0].total, own[1].total)
        self._parts = [(t.rows, empty_pair(like, t.size, wire)) for t in step.collects]
        with probe("communication"):
            self.pending = link.exchange(sends, _messages(step.collects, self._parts))

    def add(self) -> None:
        """Wait for the messages and add what arrived."""
        with self._probe("communication"):
            self.pending.wait()
        del self.pending
        with self._probe("accumulate"):
            while self._parts:
                rows, parts = self._parts.pop()
                for total, part in zip(self._own, parts[:2], strict=True):
                    at = 0
                    for start, stop in rows:
                        total.add(None, (start, stop), part[:, :, at : at + stop - start])
                        at += stop - start


def empty_pair(like: Pair, size: int, dtype: torch.dtype | None = None) -> Pair:
    """One flat buffer for `size` rows, and its two halves shaped as keys and values."""
    shapes = [(*x.shape[:2], size, x.shape[3]) for x in like[:2]]
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = like.k.new_empty(sum(counts), dtype=dtype or like.k.dtype)
    k, v = (part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True))
    return Pair(k, v, flat)


def _messages(
    transfers: Sequence[Transfer], parts: Sequence[tuple[Spans, Pair]]
) -> list[tuple[int, Tensor]]:
    return [
        (transfer.peer, part.flat)
        for transfer, (_, part) in zip(transfers, parts, strict=True)
        if part.flat is not None
    ]


def _packed(source: Pair, rows: Spans, dtype: torch.dtype) -> Tensor:
    """Rows of keys and values in one message; without a copy where that is all of one buffer."""
    whole = rows == ((0, source.k.shape[2]),) and dtype == source.k.dtype
    if source.flat is not None and whole:
        return source.flat
    packed = empty_pair(source, sum(stop - start for start, stop in rows), dtype)
    for part, x in ((packed.k, source.k), (packed.v, source.v)):
        at = 0
        for start, stop in rows:
            part[:, :, at : at + stop - start].copy_(x[:, :, start:stop])
            at += stop - start
    assert packed.flat is not None  # invariant: `empty_pair` has one
    return packed.flat


def _place(target: Tensor, packed: Tensor, rows: Spans) -> None:
    at = 0
    for start, stop in rows:
        target[:, :, start:stop].copy_(packed[:, :, at : at + stop - start])
        at += stop - start
