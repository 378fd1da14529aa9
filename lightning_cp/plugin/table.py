"""The start table: what was resolved, printed once on the first rank."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_cp.api import Shard
from lightning_cp.config import Config
from lightning_cp.context import Context, Served
from lightning_cp.data import Fields
from lightning_cp.errors import RefusedError
from lightning_cp.kernels import choose
from lightning_cp.mesh import Mesh
from lightning_cp.recomputation import described
from lightning_cp.sequences import Sequence
from lightning_cp.topology import Topology

HEAD = 64
"""Channels of a head that every kernel takes."""


class StartTable:
    """Prints sizes, coordinates, what is cut and how, with the first batch of a run.

    Args:
        mesh: groups and sizes.
        config: options as the user gave them.
    """

    def __init__(self, mesh: Mesh, config: Config) -> None:
        self._mesh, self._config, self._shown = mesh, config, mesh.rank != 0
        self._kernel = ""
        self._served: set[Served] = set()

    def show(self, shard: Shard, place: str, queries: Tensor) -> None:
        """Print the table, the first time and on global rank 0 only.

        Args:
            shard: the first batch.
            place: where it was cut.
            queries: see `attended`.
        """
        if self._shown:
            return
        self._shown = True
        table = Table(title="context parallelism", show_header=False)
        for name, value in self.rows(shard, place, queries):
            table.add_row(name, value)
        Console().print(table)
        self._kernel = _chosen(self._config.attention_backend, queries)

    def served(self, context: Context) -> None:
        """Print which kernels calls took, the first time that they took another than the table's.

        Args:
            context: of a step that has run.
        """
        if not self._kernel:
            return
        new = [x for x in context.log.kernels if x not in self._served and x.kernel != self._kernel]
        self._served.update(context.log.kernels)
        if not new:
            return
        table = Table(title="attention kernels of other calls", show_header=False)
        for kind in new:
            table.add_row(_kind(kind), "; ".join([kind.kernel, *kind.passed]))
        Console().print(table)

    def rows(self, shard: Shard, place: str, queries: Tensor) -> list[tuple[str, str]]:
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
            _ranks(topology),
            ("context groups", "; ".join(str(list(g)) for g in topology.groups("cp"))),
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
            ("attention kernel", _kernel(config.attention_backend, queries)),
            *DROPOUT[config.attention_dropout],
            ("recomputation", _recomputation(shard.context)),
            ("loss", LOSSES[config.loss]),
            ("parameters", _parameters(config, topology)),
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


def attended(
    module: nn.Module, plugin: Any, policy: MixedPrecisionPolicy | None, device: torch.device
) -> Tensor:
    """An empty tensor `[1, 1, 1, D]` of the device and dtype of the queries of a step.

    Args:
        module: its first floating parameter has the dtype, where nothing else says one.
        plugin: of the precision; autocast comes first.
        policy: that of the user for sharded parameters.
        device: of this rank.
    """
    with plugin.forward_context():
        cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if cast else None
    dtype = dtype or (None if policy is None else policy.param_dtype)
    floats = (x.dtype for x in module.parameters() if x.is_floating_point())
    dtype = dtype or next(floats, torch.get_default_dtype())
    return torch.empty(1, 1, 1, HEAD, device=device, dtype=dtype)


def _kernel(given: str, queries: Tensor) -> str:
    """The kernel for ordinary heads, and why the ones before it are passed over."""
    try:
        name, passed = choose(given, queries, queries)
    except RefusedError as error:
        return f"none: {error}"
    if given not in ("auto", "sdpa"):
        return name
    kind = f"{given}, for {_dtype(queries.dtype)} on {queries.device.type}"
    return f"{name} ({'; '.join([kind, *passed])})"


def _chosen(given: str, queries: Tensor) -> str:
    """Name of the kernel for ordinary heads."""
    return _kernel(given, queries).partition(" ")[0]


def _kind(call: Served) -> str:
    """A kind of attention call in words."""
    size, value_size = call.dims
    heads = f"heads of {size}" + (f", values of {value_size}" if size != value_size else "")
    terms = f"with {', '.join(call.terms)}" if call.terms else "plain"
    return f"{terms} ({_dtype(call.dtype)}, {heads})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DROPOUT: dict[str, tuple[tuple[str, str], ...]] = {
    "refuse": (),
    "tile": (("attention dropout", "numbers of every call, rank and block (tile)"),),
    "off": (("attention dropout", "left out (off)"),),
}
"""Rows of the choices of `attention_dropout`."""


def _documents(sequence: Sequence) -> str:
    return "one per row" if sequence.documents is None else "by position_ids, kept apart"


def _recomputation(context: Context) -> str:
    return described(None if context.module is None else context.module())


def _ranks(topology: Topology) -> tuple[str, str]:
    shared = topology.tp > 1
    sizes = f"{topology.dp} x {topology.cp}" + (f" x {topology.tp}" if shared else "")
    return f"data x context{' x tensor' if shared else ''} ranks", f"{sizes} = {topology.world}"


def _parameters(config: Config, topology: Topology) -> str:
    replicas = f" in {topology.dp_replicate} replicas" if topology.dp_replicate > 1 else ""
    parts = topology.dp_shard * topology.cp
    sharded = f"sharded over {parts} ranks{replicas}" if config.zero_stage else "all on every rank"
    return f"{sharded} (zero_stage={config.zero_stage})"


def _resolved(given: object, used: object) -> str:
    return f"{used} (auto)" if given == "auto" else str(given)
