"""Which heads a rank computes where heads are dealt out: integer spans, no tensors.

Legend: H query heads, Hk key heads, ratio = H / Hk; query head `h` reads key head `h // ratio`.
"""

from itertools import pairwise
from typing import NamedTuple

from lightning_cp.spans import Span


class Heads(NamedTuple):
    """Query heads, and the key heads that they read."""

    q: Span
    kv: Span

    @property
    def counts(self) -> tuple[int, int]:
        """How many query heads and key heads."""
        return self.q[1] - self.q[0], self.kv[1] - self.kv[0]

    def within(self, outer: "Heads") -> "Heads":
        """The same heads, counted from the first of `outer`."""
        (q, q_end), (kv, kv_end) = self.q, self.kv
        first, first_kv = outer.q[0], outer.kv[0]
        return Heads((q - first, q_end - first), (kv - first_kv, kv_end - first_kv))


def shares(heads: int, kv_heads: int, parts: int) -> tuple[Heads, ...]:
    """Query heads dealt out in order, as evenly as integers allow.

    A key head goes to every part that has a query head which reads it, so that parts may share one.
    """
    ratio = heads // kv_heads
    edges = [heads * part // parts for part in range(parts + 1)]
    return tuple(
        Heads((start, stop), (start // ratio, -(-stop // ratio))) for start, stop in pairwise(edges)
    )


def portions(share: Heads, ratio: int, count: int) -> tuple[Heads, ...]:
    """A share in `count` parts of whole key heads; there are at least as many key heads."""
    (start, stop), (first, last) = share
    edges = [first + (last - first) * part // count for part in range(count + 1)]
    return tuple(
        Heads((max(start, low * ratio), min(stop, high * ratio)), (low, high))
        for low, high in pairwise(edges)
    )


def uniform(share: Heads, ratio: int) -> tuple[Heads, ...]:
    """A share in parts of which every key head serves equally many query heads.

    Only the first and the last key head of a share may serve fewer than `ratio`.
    """
    (start, stop), (first, last) = share
    found: list[Heads] = []
    for head in range(first, last):
        span = max(start, head * ratio), min(stop, (head + 1) * ratio)
        if found:
            q, kv = found[-1]
            if (q[1] - q[0]) == (span[1] - span[0]) * (kv[1] - kv[0]):
                found[-1] = Heads((q[0], span[1]), (kv[0], head + 1))
                continue
        found.append(Heads(span, (head, head + 1)))
    return tuple(found)
