"""From times to the constants of a cost model: pure functions of numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_cp.balance import CostModel
from lightning_cp.errors import ContextParallelError


class Attended(NamedTuple):
    """Attention of a piece of a document, forward and backward.

    Attributes:
        queries: tokens of the piece.
        pairs: (query, key) pairs that are visible.
        seconds: all heads together.
    """

    queries: int
    pairs: int
    seconds: float

    @property
    def keys(self) -> float:
        """Keys that a query sees on average."""
        return self.pairs / self.queries


class Sent(NamedTuple):
    """A message that every rank sends to the next while it receives one from the rank before."""

    size: int
    seconds: float


class Times(NamedTuple):
    """What was measured.

    Attributes:
        attended: pieces of several sizes.
        token: seconds that the linear layers take for a token, forward and backward.
        sent: messages of several sizes.
    """

    attended: list[Attended]
    token: float
    sent: list[Sent]


def fitted(times: Times, *, key_bytes: float) -> CostModel:
    """The cost model that is closest to the times, in relative errors.

    Args:
        times: what was measured.
        key_bytes: see `CostModel`.

    Raises:
        ContextParallelError: if a constant comes out at 0 or less, because the times are noise.
    """
    pair, key = two_terms([(x.pairs, x.keys, x.seconds) for x in times.attended])
    byte, latency = two_terms([(x.size, 1, x.seconds) for x in times.sent])
    found = {
        "seconds for a pair": pair,
        "seconds for a key that a piece sees": key,
        "seconds for a token": times.token,
        "seconds for a byte": byte,
        "seconds for a message": latency,
    }
    wrong = [f"{name} {value:.3g}" for name, value in found.items() if not value > 0]
    if wrong:
        raise ContextParallelError(
            f"the fit finds {', '.join(wrong)}, which cannot be: the times do not grow with what "
            f"was asked for. Run again while the machine does nothing else, with more --repeats "
            f"or more --tokens"
        )
    return CostModel(
        pair=pair,
        token=times.token,
        tile=key / pair,
        key_bytes=key_bytes,
        bandwidth=1 / byte,
        latency=latency,
    )


def two_terms(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The `a` and `b` with the least sum of squares of `(a x + b y) / t - 1` over samples.

    Args:
        samples: `(x, y, t)` with `t` above 0, not all of one ratio of `x` to `y`.
    """
    scaled = [(x / t, y / t) for x, y, t in samples]
    # In units of the largest, so that squares of small and large terms keep their digits.
    largest = max(x for x, _ in scaled), max(y for _, y in scaled)
    units = [(x / largest[0], y / largest[1]) for x, y in scaled]
    xx, xy, yy = (sum(u[i] * u[j] for u in units) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = sum(x for x, _ in units), sum(y for _, y in units)
    determinant = xx * yy - xy * xy
    a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    return a / largest[0], b / largest[1]
