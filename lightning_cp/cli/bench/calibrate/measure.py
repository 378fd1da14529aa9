"""Times of attention, of matrix products and of messages, by a clock that is given."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_cp.cli.bench.attention.measure import Inputs
from lightning_cp.cli.bench.attention.settings import DTYPES
from lightning_cp.cli.bench.calibrate.fit import Attended, Sent
from lightning_cp.cli.bench.packed.measure import Clock, GroupCall
from lightning_cp.comm.p2p import Link
from lightning_cp.errors import ConfigError
from lightning_cp.kernels import Kernel, resolve
from lightning_cp.plan import Plan, Round, Tile

MESSAGES = (2**12, 2**16, 2**20, 2**23)
"""Bytes."""
SHORT = (16, 64, 256)
"""Queries of short pieces."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A layer, and what is run of it.

    Attributes:
        tokens: of the longest document.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of a head.
        width: of the linear layers.
        matrices: weights of the linear layers, in matrices of `width` x `width`.
        dtype: a name of `DTYPES`.
        world: processes that send messages.
        repeats: runs of each, of which the quickest counts.

    Raises:
        ConfigError: if a value cannot work, with the command's option.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    matrices: int
    dtype: str
    world: int
    repeats: int

    def __post_init__(self) -> None:
        least = {"tokens": 4 * SHORT[0], "world": 2}
        for name in ("tokens", "heads", "kv_heads", "head_dim", "width", "matrices", "world"):
            self._at_least(name, least.get(name, 1))
        self._at_least("repeats", 1)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; every key head "
                f"serves as many query heads as the others"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is less than {least}; choose {least} or more"
            )

    @property
    def key_bytes(self) -> int:
        """What travels for a key and its value: twice there, once their gradient, 4 bytes or more.

        See `CostModel.key_bytes`.
        """
        itemsize = DTYPES[self.dtype].itemsize
        return 2 * self.kv_heads * self.head_dim * (2 * itemsize + max(itemsize, 4))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Queries at the end of a document, and the tokens of the document."""
        return [
            (queries, tokens)
            for tokens in (self.tokens, self.tokens // 4)
            for queries in sorted({*SHORT, tokens})
            if queries <= tokens
        ]


def quickest(
    call: Callable[[], object],
    *,
    repeats: int,
    clock: Clock,
    barrier: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of the quickest run of a call; one run before them is dropped.

    Other work on the machine makes runs slower, never quicker.
    """
    call()
    found = []
    for _ in range(repeats):
        barrier()
        start = clock()
        call()
        found.append(clock() - start)
    return min(found)


def attended(
    sizes: Sizes, *, kernel: Kernel | None = None, clock: Clock = time.perf_counter
) -> list[Attended]:
    """Attention of pieces of several sizes, with merges and sums as in a step.

    Args:
        sizes: of the pieces.
        kernel: what computes tiles, the one for the tensors where not given.
        clock: in seconds.
    """
    whole = _inputs(sizes)
    kernel = kernel or resolve("auto", whole.q, whole.v)
    found = []
    for queries, tokens in sizes.pieces:
        tile = Tile((0, queries), (0, tokens), causal=True)
        plan = Plan(0, 1, "direct", queries, tokens, (Round(tokens, tiles=(tile,)),))
        local = Inputs(
            whole.q[:, :, :queries],
            whole.k[:, :, :tokens],
            whole.v[:, :, :tokens],
            whole.grad_out[:, :, :queries],
        )
        call = GroupCall([plan], kernel, [local])
        seconds = quickest(call, repeats=sizes.repeats, clock=clock)
        found.append(Attended(queries, tile.pairs, seconds))
    return found


def token_seconds(sizes: Sizes, *, clock: Clock = time.perf_counter) -> float:
    """Seconds of the linear layers for a token: product, and both gradients."""
    dtype = DTYPES[sizes.dtype]
    rows, gradient = (torch.ones(sizes.tokens, sizes.width, dtype=dtype) for _ in range(2))
    weight = torch.ones(sizes.width, sizes.width, dtype=dtype)

    def products() -> None:
        rows @ weight
        gradient @ weight.T
        gradient.T @ rows

    seconds = quickest(products, repeats=sizes.repeats, clock=clock)
    return sizes.matrices * seconds / sizes.tokens


def sent(
    link: Link,
    *,
    rank: int,
    world: int,
    repeats: int,
    barrier: Callable[[], object],
    clock: Clock = time.perf_counter,
    messages: Sequence[int] = MESSAGES,
) -> list[Sent]:
    """Messages of several sizes around a ring; every rank calls.

    Args:
        link: what carries them.
        rank: rank within the group.
        world: ranks of the group, at least 2.
        repeats: runs of each, of which the quickest counts.
        barrier: lets all ranks start together.
        clock: in seconds.
        messages: bytes of each.
    """
    after, before = (rank + 1) % world, (rank - 1) % world
    found = []
    for size in messages:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)

        def turn(out: torch.Tensor = out, into: torch.Tensor = into) -> None:
            link.exchange([(after, out)], [(before, into)]).wait()

        seconds = quickest(turn, repeats=repeats, clock=clock, barrier=barrier)
        found.append(Sent(size, seconds))
    return found


def _inputs(sizes: Sizes) -> Inputs:
    generator = torch.Generator().manual_seed(13)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    shapes = ((1, sizes.tokens, count, sizes.head_dim) for count in heads)
    dtype = DTYPES[sizes.dtype]
    return Inputs(
        *(torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    )
