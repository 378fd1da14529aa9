"""What travels between the command and its ranks, as JSON files."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from lightning_cp.config import SequenceDim


@dataclass(frozen=True, kw_only=True)
class Job:
    """One verification.

    Attributes:
        target: file and function, as `FILE.py:FUNCTION`; None: `config` says what is verified.
        config: configuration file of LightningCLI, None for none.
        ranks: number of processes.
        max_tokens: tokens of a row that are used.
        seed: seed of the parameters and the batch.
        options: of `lightning_cp.config.Config`.
        result: file for what rank 0 found.
    """

    target: str | None
    config: str | None
    ranks: int
    max_tokens: int
    seed: int
    options: dict[str, str | dict[str, SequenceDim]]
    result: str

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Read from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
