"""How many bytes the run of a plan holds: the executor's buffers, counted without running it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_cp.plan.rounds import Round, Transfer, square
from lightning_cp.spans import total, union

CHUNK = 2**19
"""Elements of an output that are merged at a time, which bounds the temporary memory."""

BANDED = 256
"""Queries of a banded tile that a kernel which takes masks computes at a time."""

MANY = 8
"""Rounds of which a float's sum is in double if there are more: else its error grows with them."""

NARROW, SMALL = 128, 2**16
"""Rows or keys, and pairs of them, of a tile whose half-precision backward a CPU does in float."""


class Memory(NamedTuple):
    """Peak bytes of one attention call on one rank, inputs not counted."""

    forward: int
    backward: int


class Sizes(NamedTuple):
    """Sizes of the tensors of a call; `state` are the bytes of an element of a running sum."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    state: int

    @property
    def wire(self) -> int:
        """Bytes of an element of a gradient on its way, and of a log-sum-exp."""
        return max(self.itemsize, 4)

    def groups(self, count: int) -> tuple["Sizes", ...]:
        """The sizes of every group of heads, of at most `count`."""
        count = min(count, self.kv_heads)
        edges = [self.kv_heads * index // count for index in range(count + 1)]
        ratio = self.heads // self.kv_heads
        return tuple(
            self._replace(heads=(stop - start) * ratio, kv_heads=stop - start)
            for start, stop in pairwise(edges)
        )

    @property
    def query(self) -> int:
        """Elements of a query row, of all heads and batch rows."""
        return self.batch * self.heads * self.head_dim

    @property
    def out(self) -> int:
        """Elements of an output row."""
        return self.batch * self.heads * self.value_dim

    @property
    def pair(self) -> int:
        """Elements of a row of keys and values."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def filled(self) -> "Sizes":
        """The sizes that a kernel for keys and values of one size works on."""
        size = max(self.head_dim, self.value_dim)
        return self._replace(head_dim=size, value_dim=size)

    def copies(self, q_rows: int, k_rows: int, *, backward: bool) -> int:
        """Elements of a block's tensors that are filled up with zeros."""
        size, short = max(self.head_dim, self.value_dim), self.head_dim - self.value_dim
        keys = k_rows * self.kv_heads * (short != 0)
        queries = q_rows * self.heads * ((short < 0) + 2 * backward * (short > 0))
        return self.batch * size * (keys + queries)


def state_size(itemsize: int, rounds: int) -> int:
    """Bytes of an element of a running result of so many rounds: at least float, see `MANY`."""
    return 8 if itemsize == 4 and rounds > MANY else max(itemsize, 4)


def slow_in_half(q_rows: int, k_rows: int) -> bool:
    """Whether the half-precision backward of a CPU is slower than copies to float and back."""
    return min(q_rows, k_rows) <= NARROW or q_rows * k_rows <= SMALL


def forward_peak(
    rounds: Sequence[Round], groups: Sequence[Sizes], q_size: int, sizes: Sizes
) -> int:
    """The most bytes at a time in a forward, all groups of heads one after the other."""
    results = q_size * (sizes.out * sizes.itemsize + sizes.batch * sizes.heads * sizes.wire)
    peak, several = 0, _several(rounds, keys=False)
    for index, group in enumerate(groups):
        running = q_size * group.out * group.state * (several and group.state != group.itemsize)
        running += q_size * group.batch * group.heads * group.state * (group.state != group.wire)
        for at, step in enumerate(rounds):
            held = results + running + _buffer(step, group, first=not at)
            held += _coming(rounds, groups, index, at)
            arriving = results + running + _arriving(step, group) if at else 0
            peak = max(peak, arriving, held + _part(step, group, merged=bool(at)))
    return max(peak, results)


def backward_peak(
    rounds: Sequence[Round],
    groups: Sequence[Sizes],
    shards: tuple[int, int],
    sizes: Sizes,
    *,
    wire: int,
    wide: bool = False,
) -> int:
    """The most bytes at a time in a backward; `shards` are local queries and keys.

    An element of a gradient that travels has `wire` bytes. With `wide` the results of keys and
    values are at least float.
    """
    q_size, kv_size = shards
    own = sizes.wire if wide else sizes.itemsize
    results = q_size * sizes.query * sizes.itemsize + kv_size * sizes.pair * own
    peak, homing, unfinished = 0, 0, 0
    wider = sizes.itemsize == 2 and any(slow_in_half(q, k) for q, k, _ in _blocks(rounds[0]))
    several, kv_several = (wider or _several(rounds, keys=keys) for keys in (False, True))
    for index, group in enumerate(groups):
        running = q_size * group.query * group.state * (several and group.state != group.itemsize)
        running += kv_size * group.pair * group.state * (kv_several and group.state != own)
        for at, step in enumerate(rounds):
            fixed = results + running + unfinished
            buffer = _buffer(step, group, first=not at)
            coming = _coming(rounds, groups, index, at)
            grads = step.size * group.pair * group.wire if at else 0
            if at:
                peak = max(peak, fixed + homing + _arriving(step, group))
            peak = max(peak, fixed + homing + buffer + coming + grads + _parts(step, group))
            if at:
                unfinished = 0
                held = results + running + buffer + coming
                row = group.pair * wire
                whole = wire == group.wire and _whole(step.returns, step.size)
                received = _rows(step.collects) * row
                packed = 0 if whole else _rows(step.returns) * row
                peak = max(peak, held + grads + packed + received)
                homing = (grads if whole else packed) + received
        unfinished = running if len(rounds) > 1 else 0
    return max(peak, results)


def _several(rounds: Sequence[Round], *, keys: bool) -> bool:
    """Whether rows of queries, or keys, get several parts, or one of a batch row."""
    if len(rounds) > 1:
        return True
    blocks = [block for tile in rounds[0].tiles for block in square(tile, BANDED)]
    spans = [block.k if keys else block.q for block in blocks]
    disjoint = sum(stop - start for start, stop in spans) == total(union(spans))
    return not disjoint or any(block.row is not None for block in blocks)


def _buffer(step: Round, group: Sizes, *, first: bool) -> int:
    return 0 if first else step.size * group.pair * group.itemsize


def _coming(rounds: Sequence[Round], groups: Sequence[Sizes], index: int, at: int) -> int:
    """Messages of the next round that needs any, this group's or the first of the next one."""
    group, step = groups[index], rounds[at + 1] if at + 1 < len(rounds) else None
    if step is None:
        if index + 1 == len(groups) or len(rounds) == 1:
            return 0
        group, step, at = groups[index + 1], rounds[1], 0
    relayed = step.relay and _whole(step.sends, rounds[at].size)
    sent = 0 if relayed else _rows(step.sends)
    return (sent + _rows(step.receives)) * group.pair * group.itemsize


def _arriving(step: Round, group: Sizes) -> int:
    """Messages of several peers, and the buffer that they are put into."""
    if _whole(step.receives, step.size):
        return step.size * group.pair * group.itemsize
    return (_rows(step.receives) + step.size) * group.pair * group.itemsize


def _part(step: Round, group: Sizes, *, merged: bool) -> int:
    """The most that a block needs: its mask while it is made, or its output, LSE and merging."""
    row = group.filled.out * group.itemsize + group.batch * group.heads * group.wire
    found = 0
    for q, k, banded in _blocks(step):
        mask = banded * q * k * group.itemsize
        making = mask + banded * 2 * q * k
        merging = min(q * group.out, CHUNK) * group.state
        merging *= merged and group.state != group.itemsize
        copies = group.copies(q, k, backward=False) * group.itemsize
        found = max(found, copies + making, copies + mask + q * row, q * row + merging)
    return found


def _parts(step: Round, group: Sizes) -> int:
    """Gradients of the largest block, with what it copies and its mask."""
    return max((_gradients(*block, group) for block in _blocks(step)), default=0)


def _gradients(q: int, k: int, banded: bool, group: Sizes) -> int:
    wide, copies = group.filled, group.copies(q, k, backward=True)
    grads = q * wide.query + k * wide.pair
    mask = banded * q * k
    if group.itemsize == 2 and slow_in_half(q, k):
        return (2 * grads + 2 * q * wide.out + mask) * group.wire
    return (grads + mask + copies) * group.itemsize


def _blocks(step: Round) -> Iterator[tuple[int, int, bool]]:
    """Queries and keys of every block that a kernel computes at a time, and whether a band."""
    for tile in step.tiles:
        for (start, stop), (first, last), _, _, band in square(tile, BANDED):
            yield stop - start, last - first, band is not None


def _rows(transfers: Sequence[Transfer]) -> int:
    return sum(transfer.size for transfer in transfers)


def _whole(transfers: Sequence[Transfer], size: int) -> bool:
    """Whether one message is all of a buffer, in its order."""
    return len(transfers) == 1 and transfers[0].rows == ((0, size),)
