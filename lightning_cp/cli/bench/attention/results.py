"""What a rank measured, as it travels to the command: JSON files."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What does not depend on time; found in the first launch.

    Attributes:
        errors: on rank 0, for out, dq, dk and dv the error over the single device's, or for
            double the error itself; empty on the other ranks.
        bytes_sent: bytes that this rank sent in a forward and a backward.
        memory: peak bytes of new tensors, in forward and in backward, their results included.
    """

    errors: dict[str, float]
    bytes_sent: int
    memory: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case on one rank in one launch; seconds.

    Attributes:
        ideal_cpu: CPU time of the process in each run of the ideal, one more than pairs.
        ideal_wall: wall time of the same runs.
        real_cpu: CPU time of the process in each run of the executor, which lies between two runs
            of the ideal.
        real_wall: wall time of the same runs.
        phases: CPU time of a forward and a backward by phase, "background" for other threads and
            "other" for the main thread outside the phases.
        checks: None but in the first launch.
    """

    ideal_cpu: list[float]
    ideal_wall: list[float]
    real_cpu: list[float]
    real_wall: list[float]
    phases: dict[str, float]
    checks: Checks | None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """All of one rank in one launch.

    Attributes:
        link_rate: of the emulated link in Gbit/s, as measured; None without one.
        cases: in the order of `Settings.cases`.
    """

    link_rate: float | None
    cases: list[CaseResult]

    def save(self, folder: Path, rank: int) -> None:
        """Write the file of a rank."""
        _file(folder, rank).write_text(json.dumps(dataclasses.asdict(self)), encoding="ascii")

    @classmethod
    def load(cls, folder: Path, rank: int) -> "RankResult":
        """Read the file of a rank."""
        found = json.loads(_file(folder, rank).read_text(encoding="ascii"))
        cases = []
        for case in found["cases"]:
            checks = case.pop("checks")
            if checks is not None:
                checks = Checks(**{**checks, "memory": tuple(checks["memory"])})
            cases.append(CaseResult(**case, checks=checks))
        return cls(link_rate=found["link_rate"], cases=cases)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
