"""What a schedule answers, and the facts that it may ask for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_cp.errors import ConfigError
from lightning_cp.spans import Spans, intersection, total


@dataclass(frozen=True, slots=True)
class Demand:
    """Which global positions the ranks hold, and which of them their queries see.

    Attributes:
        owned: keys of every rank, sorted and disjoint.
        needs: keys that the queries of every rank see, wherever they are.
    """

    owned: Sequence[Spans]
    needs: Sequence[Spans]
    _known: dict[tuple[int, int], Spans] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.owned)

    def wanted(self, owner: int, reader: int) -> Spans:
        """Keys of `owner` that the queries of `reader` see."""
        key = (owner, reader)
        if key not in self._known:
            self._known[key] = intersection(self.owned[owner], self.needs[reader])
        return self._known[key]

    def most(self, distances: Sequence[int]) -> int:
        """The most keys that a rank wants of the ranks so many places before it."""
        return max(
            sum(total(self.wanted((rank - d) % self.world, rank)) for d in distances)
            for rank in range(self.world)
        )


class Schedule(Protocol):
    """Who gets what in which round. Pure functions of ranks and spans, the same on every rank.

    In round `step` (from 1) a rank reads keys of the ranks that lie `rounds()[step - 1]` places
    before it, in a circle. Where blocks of ranks swap heads for tokens, `rounds` and `carried` are
    about blocks in place of ranks.

    Attributes:
        name: what the exchange is called.
        relay: keys come from the neighbour, which got them a round earlier, not from the owner.
        head_chunks: into how many groups the heads are cut, which travel one after the other.
        half_grads: gradients of keys and values travel in the dtype of the keys, also in half
            precision.
    """

    @property
    def name(self) -> str: ...

    @property
    def relay(self) -> bool: ...

    @property
    def head_chunks(self) -> int: ...

    @property
    def half_grads(self) -> bool: ...

    def __hash__(self) -> int: ...

    def block(self, world: int) -> int:
        """How many neighbouring ranks swap heads for tokens and act as one; 1 where none do.

        Raises:
            ConfigError: if blocks of the size that was asked for do not make up `world` ranks.
        """
        ...

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """For every round the distances to the ranks whose keys are read; each distance once."""
        ...

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """Global positions of the keys of `owner` that `reader` receives."""
        ...


class NoRounds:
    """Of a schedule by which no keys travel between ranks, or between blocks of them."""

    def rounds(self, demand: Demand) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    def carried(self, owner: int, reader: int, demand: Demand) -> Spans:
        """Nothing."""
        return ()


def check_options(head_chunks: int, half_grads: bool) -> None:
    """Refuse what is no number of groups of heads, or no choice.

    Raises:
        ConfigError: if `head_chunks` is no positive integer, or `half_grads` no bool.
    """
    if isinstance(head_chunks, bool) or not isinstance(head_chunks, int) or head_chunks < 1:
        raise ConfigError(
            f"head_chunks={head_chunks!r} must be a positive integer: into how many groups the "
            f"heads are cut, 1 for all at once"
        )
    if not isinstance(half_grads, bool):
        raise ConfigError(
            f"half_grads={half_grads!r} must be True, for gradients that travel in the dtype of "
            f"the keys, or False, for at least four bytes an element"
        )
