"""Scalars that a step logs: one value for the whole group, whatever its ranks hold.

[Note: equal or not] A value that is equal on all ranks of a group was computed from what they
share, and is kept. A value that differs was computed from local tokens, and is reduced by the
reduction it is logged with. For means and extremes both give the same where ranks agree by chance.
For sums they do not, so a name that was summed once is summed ever after.
"""

import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.gather import gather_objects
from lightning_cp.comm.reduce import sum_
from lightning_cp.errors import ContextParallelWarning, MismatchError, RefusedError

ROOM = 16
"""Values that travel with the first message of a step; more of them need a second one."""

CLOSE = 1e-6
"""Relative difference that rounding explains between values computed from the same numbers."""

KINDS = ("mean", "sum", "min", "max")
"""Reductions that a value can be logged with."""


class Logged(NamedTuple):
    """A scalar that one rank logs.

    Attributes:
        name: what it is called.
        value: a number, or a tensor of one element.
        kind: how values are put together: one of `KINDS`.
        size: how many items it stands for, where the user said so: the weight of a mean.
    """

    name: str
    value: Tensor | float
    kind: str = "mean"
    size: Tensor | float | None = None


class Group(NamedTuple):
    """What the ranks of a group hold of one logged value.

    Attributes:
        values: by rank.
        weights: tokens of every rank that count.
        sizes: how many items the values stand for, NaN where nobody said so.
        exact: whether the values are integers.
    """

    values: Sequence[float]
    weights: Sequence[float]
    sizes: Sequence[float]
    exact: bool


class Reduced(NamedTuple):
    """What the group logs.

    Attributes:
        value: None where the ranks agree and each logs what it has.
        size: None as above.
    """

    value: float | None
    size: float | None


def alike(values: Sequence[float], *, exact: bool) -> bool:
    """Whether values are the same but for rounding; NaN is like NaN."""
    first = values[0]
    if all(x == first or (math.isnan(x) and math.isnan(first)) for x in values):
        return True
    finite = all(math.isfinite(x) for x in values)
    return not exact and finite and max(values) - min(values) <= CLOSE * max(map(abs, values))


def combined(group: Group, kind: str) -> float:
    """One value from those of all ranks.

    A mean is weighted by the sizes where they are given and differ, else by the tokens that count,
    and equally where no token does. NaN of a rank whose weight is 0 is left out: it is a mean over
    no token.

    Args:
        group: what the ranks hold.
        kind: one of `KINDS`.

    Raises:
        RefusedError: if a mean needs weights that the batch does not give.
    """
    sized = not any(map(math.isnan, group.sizes)) and not alike(group.sizes, exact=True)
    weights = group.sizes if sized else group.weights
    if kind == "mean" and any(map(math.isnan, weights)):
        raise RefusedError("it is not known how many tokens of a rank count")
    pairs = [(x, w) for x, w in zip(group.values, weights, strict=True) if x == x or w != 0]
    values = [x for x, _ in pairs]
    if not values or any(map(math.isnan, values)):
        return math.nan
    if kind == "sum":
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    if kind == "mean":
        total = sum(w for _, w in pairs)
        if total == 0:
            return sum(values) / len(values)
        return sum(x * w for x, w in pairs if w != 0) / total
    return min(values) if kind == "min" else max(values)


def reduced_of(logged: Sequence[Logged], weights: Sequence[float]) -> Logged:
    """What a group logs, of what every rank of it does; NaN where that would be refused.

    Args:
        logged: by rank, the same name and kind.
        weights: by rank, tokens that count.
    """
    first = logged[0]
    values = [float(x.value) for x in logged]
    sizes = [math.nan if x.size is None else float(x.size) for x in logged]
    group = Group(values, weights, sizes, all(is_integer(x.value) for x in logged))
    if alike(values, exact=group.exact):
        return first
    try:
        return first._replace(value=combined(group, first.kind))
    except RefusedError:
        return first._replace(value=math.nan)


def reduction_of(reduce_fx: Any) -> str | None:
    """The kind of a `reduce_fx`: a name, or a function such as `torch.max`; None for others."""
    name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    name = "mean" if name == "avg" else name
    return name if name in KINDS else None


class Agreement:
    """Puts the logged values of a group's ranks together, step after step.

    Args:
        group: CPU process group.
        rank: rank within it.
        world: its size.
        say: is told in words, once for every name, that a value is reduced.
    """

    def __init__(self, *, group: Any, rank: int, world: int, say: Callable[[str], None]) -> None:
        self._group, self._rank, self._world, self._say = group, rank, world, say
        self._equal: set[str] = set()
        self._summed: set[str] = set()
        self._said: set[str] = set()

    def reduce(self, logged: Sequence[Logged], weight: float) -> list[Reduced]:
        """What the group logs in place of what this rank has; every rank calls once per step.

        One all-reduce of fixed size, and a second one only where there are more than `ROOM` values.

        Args:
            logged: what this rank logs, in any order.
            weight: tokens of this rank that count; NaN where the batch does not say.

        Returns:
            For every value what to log, the same on every rank.

        Raises:
            MismatchError: on every rank, if the ranks log different names.
            RefusedError: on every rank, if a mean needs weights that the batch does not give.
            PeerError: if a peer failed.
        """
        order = sorted(range(len(logged)), key=lambda i: logged[i].name)
        rows = self._exchanged([logged[i] for i in order], weight)
        found: dict[int, Reduced] = {}
        for place, index in enumerate(order):
            values, sizes, whole = rows[:, 1 + 3 * place : 4 + 3 * place].T.tolist()
            group = Group(values, rows[:, 0].tolist(), sizes, all(whole))
            found[index] = self._decide(logged[index], group)
        return [found[index] for index in range(len(logged))]

    def _exchanged(self, logged: Sequence[Logged], weight: float) -> Tensor:
        """What every rank sent, `[world, 1 + 3 n]`: its weight, and of each value three numbers."""
        names = [f"{x.name} ({x.kind})" for x in logged]
        code = zlib.crc32(repr(names).encode())
        own = torch.tensor([len(logged), code, weight], dtype=torch.float64)
        numbers = _numbers(logged)
        first, rest = numbers[: 3 * ROOM], numbers[3 * ROOM :]
        table = torch.zeros(self._world, 3 + 3 * ROOM, dtype=torch.float64)
        table[self._rank, : 3 + len(first)] = torch.cat([own, first])
        sum_(table, group=self._group)
        if not (table[:, :2] == table[0, :2]).all():
            self._raise(names)
        found = table[:, 2 : 3 + len(first)]
        if len(rest):
            more = torch.zeros(self._world, len(rest), dtype=torch.float64)
            more[self._rank] = rest
            found = torch.cat([found, sum_(more, group=self._group)], 1)
        return found

    def _raise(self, names: Sequence[str]) -> None:
        everyone = [Counter(given) for given in gather_objects(names, group=self._group)]
        union = Counter[str]()
        for given in everyone:
            union |= given
        missing = "; ".join(
            f"rank {rank} did not log {', '.join(map(repr, lacking.elements()))}"
            for rank, given in enumerate(everyone)
            if (lacking := union - given)
        )
        raise MismatchError(
            f"the ranks of one context-parallel group must log the same values in a step, each "
            f"with the same reduction, but {missing}; call self.log on every rank, with NaN where "
            f"a rank has no token for it, or pass rank_zero_only=True for a value of the first "
            f"rank alone"
        )

    def _decide(self, logged: Logged, group: Group) -> Reduced:
        name, kind = logged.name, logged.kind
        unknown = [math.nan] * self._world
        size = None
        if not any(map(math.isnan, group.sizes)):
            size = self._total(f"batch_size of {name}", Group(group.sizes, unknown, unknown, True))
        if kind == "sum":
            value = self._total(name, group)
            if name not in self._summed:
                self._tell(
                    f"the logged {name!r} is a sum, and equal on all ranks that share each "
                    f"sequence: it is taken for a sum over what they have in common and counted "
                    f"once; if it is over local tokens, log lightning_cp.functional.sequence_sum "
                    f"of it"
                )
        elif alike(group.values, exact=group.exact):
            value = _kept(group)
        else:
            value = _refusing(name, group, kind)
            self._tell_reduced(name, kind)
        return Reduced(value, size)

    def _total(self, name: str, group: Group) -> float | None:
        """A sum over ranks where the values differ, or once did; see [Note: equal or not]."""
        if name not in self._summed and alike(group.values, exact=group.exact):
            self._equal.add(name)
            return _kept(group)
        if name in self._equal and name not in self._summed:
            warnings.warn(
                f"the logged {name!r} was equal on all ranks of a context-parallel group in "
                f"earlier steps and counted once, and now it differs: it is a sum over local "
                f"tokens, and was too small until now; log lightning_cp.functional.sequence_sum of "
                f"it, which is right in every step",
                ContextParallelWarning,
                stacklevel=2,
            )
        self._summed.add(name)
        self._tell_reduced(name, "sum")
        return combined(group, "sum")

    def _tell_reduced(self, name: str, kind: str) -> None:
        how = "the mean weighted by the tokens that count" if kind == "mean" else f"the {kind}"
        self._tell(
            f"the logged {name!r} differs between the ranks that share each sequence, so it is a "
            f"value of local tokens; what is logged is {how} over these ranks"
        )

    def _tell(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._say(message)


def _kept(group: Group) -> float | None:
    """None where all ranks have the very same value; the first one's where rounding differs."""
    first = group.values[0]
    return None if len(set(group.values)) == 1 or math.isnan(first) else first


def _refusing(name: str, group: Group, kind: str) -> float:
    try:
        return combined(group, kind)
    except RefusedError as error:
        raise RefusedError(
            f"the logged {name!r} is a mean that differs between the ranks that share each "
            f"sequence, and {error}: dummy tokens fill the batch up, and it has no loss_mask, "
            f"labels or attention_mask that keeps them out; add a loss_mask of ones [B, S], or log "
            f"what lightning_cp.functional.sequence_mean gives"
        ) from error


def _numbers(logged: Sequence[Logged]) -> Tensor:
    """Value, size (NaN: none) and whether the value is an integer, one after the other."""
    values = _doubles([x.value for x in logged])
    sizes = _doubles([math.nan if x.size is None else x.size for x in logged])
    whole = _doubles([float(is_integer(x.value)) for x in logged])
    return torch.stack([values, sizes, whole], 1).flatten()


def is_integer(value: Tensor | float) -> bool:
    """Whether a logged value is a count, a number of steps or the like."""
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return isinstance(value, int)


def _doubles(values: Sequence[Tensor | float]) -> Tensor:
    """All values on the CPU, with one copy for those of a device."""
    found = torch.tensor(
        [0.0 if isinstance(x, Tensor) else float(x) for x in values], dtype=torch.float64
    )
    tensors = {i: x.detach().reshape(()) for i, x in enumerate(values) if isinstance(x, Tensor)}
    if tensors:
        packed = torch.stack([x.to(torch.float64) for x in tensors.values()]).cpu()
        found[list(tensors)] = packed
    return found
