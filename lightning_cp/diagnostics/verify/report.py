"""What a verification found, as values and as a table."""

from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table

from lightning_cp.errors import VerificationError


class Finding(NamedTuple):
    """The first thing that differs.

    Attributes:
        module: qualified name of the module, empty for the root module and its step.
        kind: class of the module.
        line: `file:line` of the call that shows it, empty where unknown.
        what: what agrees and what differs.
        cause: the likely cause.
        remedy: what to write instead.
    """

    module: str
    kind: str
    line: str
    what: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        """One sentence."""
        name = f"module '{self.module}'" if self.module else "the root module"
        place = f"{self.kind}, {self.line}" if self.line else self.kind
        return f"{name} ({place}): {self.what}. Likely cause: {self.cause}. Remedy: {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What was compared; errors are in units of what rounding explains, so 1 is the limit.

    Attributes:
        calls: number of calls of modules on one device.
        output: largest error of an output.
        loss: the loss on one device and with context parallelism, None where there is none.
        gradients: error by name of the parameter, of the mean over ranks.
        logs: error by name of the logged value.
        attention: number of attention calls on one device and with context parallelism.
    """

    calls: int
    output: float
    loss: tuple[float | None, float | None]
    gradients: dict[str, float]
    logs: dict[str, float]
    attention: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a verification, the same on every rank.

    Attributes:
        finding: the first thing that differs, None where all agrees.
        compared: what was compared.
        facts: how it ran, row by row.
    """

    finding: Finding | None
    compared: Compared
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the step is the same with and without context parallelism."""
        return self.finding is None

    def raise_if_wrong(self) -> None:
        """Stop where something differs.

        Raises:
            VerificationError: with the finding.
        """
        if self.finding is not None:
            raise VerificationError(str(self.finding))

    def table(self) -> Table:
        """A table to print with rich."""
        table = Table(title="with and without context parallelism", show_header=False)
        for name, value in {**self.facts, **self._rows()}.items():
            table.add_row(name, value)
        if self.finding is None:
            table.add_row("[bold green]verdict[/]", "[bold green]equal[/]")
            return table
        finding = self.finding
        place = f"{finding.module or 'the root module'} ({finding.kind})"
        table.add_section()
        table.add_row("[bold red]first difference[/]", f"[bold red]{place}[/]")
        for name in ("line", "what", "cause", "remedy"):
            if getattr(finding, name):
                table.add_row(name, getattr(finding, name))
        return table

    def _rows(self) -> dict[str, str]:
        compared = self.compared
        worst = max(compared.gradients.items(), key=lambda x: x[1], default=None)
        one, several = compared.loss
        calls = compared.attention
        return {
            "module calls": f"{compared.calls}, worst output {compared.output:.2g} x tolerance",
            "loss": "none" if one is None else f"{one:.7g} on one device, {_shown(several)} here",
            "gradients": f"{len(compared.gradients)}, worst {worst[1]:.2g} x tolerance ({worst[0]})"
            if worst
            else "none compared",
            "logged values": ", ".join(
                f"{name} {'differs' if error > 1 else 'equal'}"
                for name, error in compared.logs.items()
            )
            or "none",
            "attention calls": f"{calls[0]} on one device, {calls[1]} here",
        }


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.7g}"
