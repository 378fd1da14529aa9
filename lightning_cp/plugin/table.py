"""The start table: what was resolved, printed once on the first rank."""

from rich.console import Console
from rich.table import Table

from lightning_cp.api import Shard
from lightning_cp.config import Config
from lightning_cp.data import Fields
from lightning_cp.mesh import Mesh
from lightning_cp.sequences import Sequence


class StartTable:
    """Prints sizes, coordinates, what is cut and how, with the first batch of a run.

    Args:
        mesh: groups and sizes.
        config: options as the user gave them.
    """

    def __init__(self, mesh: Mesh, config: Config) -> None:
        self._mesh, self._config, self._shown = mesh, config, mesh.rank != 0

    def show(self, shard: Shard, place: str) -> None:
        """Print the table, the first time and on global rank 0 only.

        Args:
            shard: the first batch.
            place: where it was cut.
        """
        if self._shown:
            return
        self._shown = True
        table = Table(title="context parallelism", show_header=False)
        for name, value in self.rows(shard, place):
            table.add_row(name, value)
        Console().print(table)

    def rows(self, shard: Shard, place: str) -> list[tuple[str, str]]:
        """Names and values of the table."""
        topology, config, cut = self._mesh.topology, self._config, shard.cut
        sequences = list(cut.sequences.values())
        samples = topology.dp * cut.sequence.batch
        tokens = topology.dp * sum(x.batch * x.length for x in sequences)
        documents = "; ".join(dict.fromkeys(_documents(x) for x in sequences))
        sizes = [", ".join(map(str, x.layout.sizes)) for x in sequences]
        dummies = [str(x.layout.length - x.length) for x in sequences]
        fields = [_fields(x, len(sequences)) for x in cut.fields.values()]
        kept = ", ".join(f"{name} ({x.length} tokens)" for name, x in cut.whole.items())
        return [
            ("data x context ranks", f"{topology.dp} x {topology.cp} = {topology.world}"),
            ("context groups", "; ".join(str(list(g)) for g in topology.cp_groups())),
            ("global batch", f"{samples} rows, {tokens} tokens per micro-step"),
            ("fields cut (dim)", "; ".join(fields)),
            *([("whole on every rank", kept)] if kept else []),
            ("cut", place),
            ("fields added", ", ".join(cut.added) or "none"),
            ("tokens per rank", "; ".join(sizes)),
            ("dummy tokens per row", "; ".join(dummies)),
            ("documents", f"{documents} (documents={config.documents!r})"),
            ("layout", _resolved(config.layout, shard.layout)),
            ("exchange", _resolved(config.exchange, shard.context.exchange)),
            ("attention kernel", _resolved(config.attention_backend, "sdpa")),
            ("loss", LOSSES[config.loss]),
            ("parameters", _parameters(config, topology.world)),
        ]


def _fields(fields: Fields, count: int) -> str:
    """Fields of one of `count` sequences, with its name if there are several."""
    listed = ", ".join(f"{name or 'tensor'} ({dim})" for name, dim in fields.dims.items())
    return f"{fields.name}: {listed}" if count > 1 else listed


LOSSES = {
    "auto": "mean or sum over the tokens of the whole group, equal on its ranks",
    "token_mean": "the step's means over local tokens, averaged by the tokens that count",
}
"""What is said of the choices of `loss`."""


def _documents(sequence: Sequence) -> str:
    return "one per row" if sequence.documents is None else "by position_ids, kept apart"


def _parameters(config: Config, world: int) -> str:
    sharded = f"sharded over {world} ranks" if config.zero_stage else "all on every rank"
    return f"{sharded} (zero_stage={config.zero_stage})"


def _resolved(given: object, used: object) -> str:
    return f"{used} (auto)" if given == "auto" else str(given)
