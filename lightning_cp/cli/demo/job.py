"""What travels between the command and the programs that train, as JSON files."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    Attributes:
        strategy: the Trainer's strategy, "context_parallel" or "auto".
        devices: processes of the run.
        max_steps: optimizer steps.
        seqlen: tokens of a sequence.
        seed: seed of the parameters.
        text: file with the text.
        results: folder for one file per rank.
    """

    strategy: str
    devices: int
    max_steps: int
    seqlen: int
    seed: int
    text: str
    results: str

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="ascii")

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Read from a file."""
        return cls(**json.loads(path.read_text(encoding="ascii")))


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank saw of a run.

    Attributes:
        losses: the loss of every step, the same on all ranks of a group.
        tokens: tokens of a sequence that this rank held.
        work: pairs of a query that this rank held and a key that it attends to, per head.
        peak_bytes: peak of activations in one step, forward and backward.
    """

    losses: list[float]
    tokens: int
    work: int
    peak_bytes: int

    def save(self, folder: Path, rank: int) -> None:
        """Write to the file of a rank."""
        path = folder / f"rank-{rank}.json"
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="ascii")

    @classmethod
    def load(cls, folder: Path, rank: int) -> "RankResult":
        """Read from the file of a rank."""
        text = (folder / f"rank-{rank}.json").read_text(encoding="ascii")
        return cls(**json.loads(text))
