"""Messages that swap heads for tokens between the members of a block, there and back.

Legend: B batch, H heads that travel, N rows that travel, D head size. A message is one buffer of
bytes with rows of several tensors, those with the largest elements first, row after row with all
heads of each, as a model's projections leave them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.p2p import Link, Message
from lightning_cp.exchange.probe import Probe
from lightning_cp.plan import Heads, Switch
from lightning_cp.spans import Span, Spans, total


class Side(NamedTuple):
    """A tensor `[B, heads, rows, D]`, or `[B, heads, rows]`, of queries, or of keys.

    Attributes:
        x: the tensor, of all heads and the own tokens.
        keys: heads and rows are those of keys.
    """

    x: Tensor
    keys: bool = False

    def span(self, heads: Heads) -> Span:
        """Its part of some heads."""
        return heads.kv if self.keys else heads.q

    def rows(self, switch: Switch) -> tuple[Spans, ...]:
        """Rows of the block that every member holds."""
        return switch.kv if self.keys else switch.q

    def of(self, heads: Heads) -> Tensor:
        """The tensor, of some of its heads."""
        start, stop = self.span(heads)
        return self.x[:, start:stop]

    def empty(self, heads: Heads, size: int) -> Tensor:
        """A tensor like it for some heads and `size` rows."""
        start, stop = self.span(heads)
        return _shaped(self.x, stop - start, size)


class Fetching:
    """Tokens of the other members on their way here, of the heads of this rank.

    Args:
        switch: how heads are swapped for tokens.
        sides: own tokens of what is fetched.
        own: heads of every member.
        link: what carries the messages.
        probe: is told of the phases.
    """

    def __init__(
        self,
        switch: Switch,
        sides: Sequence[Side],
        own: Sequence[Heads],
        link: Link,
        probe: Probe,
    ) -> None:
        self._switch, self._sides, self._heads = switch, sides, own[switch.index]
        self._probe = probe
        sends: list[Message] = []
        with probe("copy"):
            for place in switch.others:
                parts = [side.of(own[place]) for side in sides]
                flat, packed = _packet([(x, x.dtype, x.shape[1], x.shape[2]) for x in parts])
                for target, x in zip(packed, parts, strict=True):
                    target.copy_(x)
                sends.append((switch.members[place], flat))
        self._parts: dict[int, list[Tensor]] = {}
        receives: list[Message] = []
        for place in switch.others:
            flat, self._parts[place] = _packet(
                [
                    (
                        side.x,
                        side.x.dtype,
                        side.of(self._heads).shape[1],
                        total(side.rows(switch)[place]),
                    )
                    for side in sides
                ]
            )
            receives.append((switch.members[place], flat))
        with probe("communication"):
            self.pending = link.exchange(_some(sends), _some(receives), role="heads")

    def wait(self) -> list[Tensor]:
        """All tokens of the block, in global order: for every side `[B, H, rows, ...]`."""
        with self._probe("communication"):
            self.pending.wait()
        del self.pending
        with self._probe("copy"):
            sizes = [sum(map(total, side.rows(self._switch))) for side in self._sides]
            whole = [
                side.empty(self._heads, size) for side, size in zip(self._sides, sizes, strict=True)
            ]
            here = self._switch.index
            self._place(whole, here, [side.of(self._heads) for side in self._sides])
            while self._parts:
                self._place(whole, *self._parts.popitem())
        return whole

    def _place(self, whole: Sequence[Tensor], place: int, parts: Sequence[Tensor]) -> None:
        for side, target, part in zip(self._sides, whole, parts, strict=True):
            at = 0
            for start, stop in side.rows(self._switch)[place]:
                target[:, :, start:stop].copy_(part[:, :, at : at + stop - start])
                at += stop - start


class Returning:
    """Results of this rank's heads on their way to the members that hold the tokens.

    Args:
        switch: how heads are swapped for tokens.
        results: of all tokens of the block and the heads of this rank.
        targets: where the results of the own tokens go, of all heads; one for each result.
        own: heads of every member.
        summed: results of keys are added to their targets, else they are put there.
        wire: dtype in which results of keys travel.
        link: what carries the messages.
        probe: is told of the phases.
    """

    def __init__(
        self,
        switch: Switch,
        results: Sequence[Tensor],
        targets: Sequence[Side],
        own: Sequence[Heads],
        *,
        summed: bool = False,
        wire: torch.dtype | None = None,
        link: Link,
        probe: Probe,
    ) -> None:
        self._targets, self._summed, self._probe = targets, summed, probe
        here = switch.index
        dtypes = [
            wire if side.keys and wire is not None else x.dtype
            for side, x in zip(targets, results, strict=True)
        ]
        sends: list[Message] = []
        with probe("copy"):
            for place in switch.receivers:
                rows = [side.rows(switch)[place] for side in targets]
                flat, packed = _packet(
                    [
                        (x, dtype, x.shape[1], total(spans))
                        for x, dtype, spans in zip(results, dtypes, rows, strict=True)
                    ]
                )
                for target, x, spans in zip(packed, results, rows, strict=True):
                    _gather(target, x, spans)
                sends.append((switch.members[place], flat))
        self._parts: list[tuple[Heads, list[Tensor]]] = []
        receives: list[Message] = []
        for place in switch.receivers:
            flat, parts = _packet(
                [
                    (side.x, dtype, side.of(own[place]).shape[1], side.x.shape[2])
                    for side, dtype in zip(targets, dtypes, strict=True)
                ]
            )
            self._parts.append((own[place], parts))
            receives.append((switch.members[place], flat))
        with probe("communication"):
            self.pending = link.exchange(_some(sends), _some(receives), role="heads")
        with probe("accumulate" if summed else "copy"):
            for side, x in zip(targets, results, strict=True):
                at = 0
                for start, stop in side.rows(switch)[here]:
                    into = side.of(own[here])[:, :, at : at + stop - start]
                    self._take(side, into, x[:, :, start:stop])
                    at += stop - start

    def add(self) -> None:
        """Wait for the messages and put what arrived where it belongs."""
        with self._probe("communication"):
            self.pending.wait()
        del self.pending
        with self._probe("accumulate" if self._summed else "copy"):
            while self._parts:
                heads, parts = self._parts.pop()
                for side, part in zip(self._targets, parts, strict=True):
                    self._take(side, side.of(heads), part)

    def _take(self, side: Side, target: Tensor, part: Tensor) -> None:
        if side.keys and self._summed:
            target.add_(part)
        else:
            target.copy_(part)


def room(x: Tensor, size: int, *, dtype: torch.dtype | None = None, zeros: bool = False) -> Tensor:
    """A tensor like `x` with `size` rows, for results; as `x` is stored where it has as many."""
    if x.shape[2] == size:
        made = torch.empty_like(x, dtype=dtype)
    else:
        made = _shaped(x, x.shape[1], size, dtype=dtype)
    return made.zero_() if zeros else made


def _shaped(x: Tensor, heads: int, size: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor like `x` for some heads and rows, the heads of a row side by side."""
    if x.ndim == 3:
        return x.new_empty(x.shape[0], heads, size, dtype=dtype)
    return x.new_empty(x.shape[0], size, heads, x.shape[3], dtype=dtype).transpose(1, 2)


def _packet(
    wanted: Sequence[tuple[Tensor, torch.dtype, int, int]],
) -> tuple[Tensor, list[Tensor]]:
    """One buffer of bytes, and its parts: like a tensor, of a dtype, of some heads and rows."""
    counts = [
        x.shape[0] * heads * size * x.shape[3:].numel() * dtype.itemsize
        for x, dtype, heads, size in wanted
    ]
    flat = wanted[0][0].new_empty(sum(counts), dtype=torch.uint8)
    parts = []
    for part, (x, dtype, heads, size) in zip(flat.split(counts), wanted, strict=True):
        shape = (x.shape[0], heads, size) if x.ndim == 3 else (x.shape[0], size, heads, x.shape[3])
        found = part.view(dtype).view(shape)
        parts.append(found if x.ndim == 3 else found.transpose(1, 2))
    return flat, parts


def _gather(target: Tensor, x: Tensor, rows: Spans) -> None:
    at = 0
    for start, stop in rows:
        target[:, :, at : at + stop - start].copy_(x[:, :, start:stop])
        at += stop - start


def _some(messages: Sequence[Message]) -> list[Message]:
    """Zero-byte messages are never sent."""
    return [(peer, buffer) for peer, buffer in messages if buffer.numel()]
