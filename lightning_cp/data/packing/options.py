"""The options of packing."""

from dataclasses import dataclass
from typing import Any

from lightning_cp.errors import ConfigError

LONG = ("split", "truncate", "refuse")
"""What to do with documents longer than a row."""

LABELS = ("aligned", "transformers")
"""Which labels a row has."""


@dataclass(frozen=True)
class Packing:
    """How documents are put into rows.

    Args:
        tokens: most tokens of a row; whole documents seldom fill it exactly, and nothing is padded.
        buffer: how many documents are looked at, for every virtual device, to fill its next row.
        long: what to do with a document of more than `tokens`: "split" makes documents of `tokens`
            of it and one of the rest (the last token of each still predicts the next one);
            "truncate" keeps the first `tokens` and warns; "refuse" stops.
        hold_longer_than: documents of more tokens than this wait until there is one of about the
            same length for every virtual device; then each gets one in the same step, so that
            devices wait less for another. None: none waits. A sixteenth of `tokens` is a
            good value.
        labels: "aligned" gives a field `labels` with the next token of the document at every token;
            "transformers" gives it as `shift_labels`, beside `labels` as models of transformers
            expect them: the tokens themselves. The last token of a document has -100, it predicts
            nothing.

    Raises:
        ConfigError: if a value is not allowed.
    """

    tokens: int
    buffer: int = 256
    long: str = "split"
    hold_longer_than: int | None = None
    labels: str = "aligned"

    def __post_init__(self) -> None:
        for name in ("tokens", "buffer", "hold_longer_than"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a positive number of {_unit(name)}")
        check_choice("long", self.long, LONG)
        check_choice("labels", self.labels, LABELS)


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Whether a value is one of those allowed.

    Raises:
        ConfigError: if it is not.
    """
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")


def _unit(name: str) -> str:
    return "documents" if name == "buffer" else "tokens"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
