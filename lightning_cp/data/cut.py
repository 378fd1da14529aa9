"""Cutting a whole batch: padding to the layout, this rank's tokens, and the facts about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_cp.balance import (
    DOCUMENT_LAYOUTS,
    Balanced,
    Causal,
    Padding,
    Work,
    layout_of,
)
from lightning_cp.config import MAIN, SequenceDims
from lightning_cp.data.apart import Sizes, told_apart
from lightning_cp.data.containers import children, items, join, last, rebuilt
from lightning_cp.data.documents import find_documents
from lightning_cp.data.fields import Fields, find_fields
from lightning_cp.errors import BatchError
from lightning_cp.layout import Layout
from lightning_cp.mask import Documents, Edges, rows_of
from lightning_cp.plan import Call, Schedule, quickest
from lightning_cp.sequences import Sequence
from lightning_cp.spans import Span

PADDING = {"labels": -100, "shift_labels": -100}
"""Values of dummy tokens where 0 would be wrong; losses ignore dummies whatever their value."""

MIN_ROWS = 2
"""A model never sees fewer local tokens: models branch on length 1 and cannot reshape length 0."""


@dataclass(frozen=True)
class Cut:
    """One rank's part of a batch.

    Attributes:
        batch: a batch of the given type with the per-token fields cut.
        fields: what was cut, by sequence.
        sequences: layout, real length and padding of every sequence that was cut.
        added: names of fields that were added.
        layout: name of the layout of the first sequence.
        seconds: what making the layouts took in this process.
        exchange: name of the schedule, or one with options.
        whole: sequences of which every rank holds all tokens.
    """

    batch: Any
    fields: Mapping[str, Fields]
    sequences: Mapping[str, Sequence]
    added: tuple[str, ...]
    layout: str
    seconds: float = field(default=0.0, compare=False)
    exchange: str | Schedule = "direct"
    whole: Mapping[str, Sequence] = field(default_factory=dict)

    @property
    def sequence(self) -> Sequence:
        """The first sequence, the one without a name of its own if there is one."""
        return next(iter(self.sequences.values()))

    @property
    def dims(self) -> dict[str, int]:
        """Sequence dimension of every field that was cut, by name."""
        return {name: dim for fields in self.fields.values() for name, dim in fields.dims.items()}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How batches are cut.

    Attributes:
        layout: name of the layout, or `Balanced` with options.
        adaptive: a row of several documents gets the layout "balanced" instead where that is
            predicted to take less time.
        work: what attention is expected to cost, causal where not given.
        exchanges: of several the one that is predicted to take least time, the first one preferred
            where times are nearly the same.
        calls: sizes of the attention calls that are expected; without any the first exchange is
            taken.
        sequence_dims: declared sequence dimensions.
        takes_positions: whether the model takes `position_ids`.
        documents: "auto" refuses rows whose positions start anew, "none" lets them attend to
            each other, "position_ids" keeps them apart.
        as_transformers: the model is one of Hugging Face's, and "auto" means what that does.
        decodes: the model is an encoder-decoder, so that labels belong to its decoder.
        pad_to_multiple_of: the padded length is a multiple of this.
    """

    layout: str | Balanced
    adaptive: bool = False
    work: Work | None = None
    exchanges: tuple[str | Schedule, ...] = ("direct",)
    calls: tuple[Call, ...] = ()
    sequence_dims: SequenceDims | None = None
    takes_positions: bool = False
    documents: str = "auto"
    as_transformers: bool = False
    decodes: bool = False
    pad_to_multiple_of: int | None = None


def cut(batch: Any, rules: Rules, *, rank: int, world: int) -> Cut:
    """Cut this rank's tokens out of a whole batch; every rank of the group passes the same batch.

    Short sequences are filled up with dummy tokens until every rank has at least two; dummies are
    attended by nobody and no loss counts them.

    Args:
        batch: whole batch: mapping, dataclass, tuple, list or tensor, nested or not, on any device.
        rules: how to cut.
        rank: rank within the context-parallel group.
        world: size of the group.

    Raises:
        BatchError: if the batch cannot be cut; see `find_fields`.
    """
    found = find_fields(batch, rules.sequence_dims, decodes=rules.decodes)
    values = items(batch)
    laid = _laid(values, found, rules, rank, world)
    whole = {name: one for name, one in laid.sequences.items() if one.whole}
    sequences = {name: one for name, one in laid.sequences.items() if not one.whole}
    added: dict[str, str] = {}
    for name in sequences if rules.takes_positions else ():
        places = _places(batch, values, found[name])
        added.update({place: name for place in places if place not in added})
    for name, sequence in sequences.items():
        fields, layout = found[name], sequence.layout
        dims = fields.dims | {place: 1 for place, of in added.items() if of == name}
        device = values[next(iter(dims))].device
        for field_name, dim in dims.items():
            if field_name in added:
                positions = torch.arange(fields.length, device=device)
                values[field_name] = positions.expand(fields.batch, -1)
            filling = PADDING.get(fields.stands_for(field_name), 0)
            full = _filled(values[field_name], dim, layout.length, filling)
            values[field_name] = layout.shard(full, rank=rank, dim=dim)
    kept = {name: fields for name, fields in found.items() if name in sequences}
    return Cut(
        rebuilt(batch, values),
        kept,
        sequences,
        (*added,),
        laid.layout,
        laid.seconds,
        laid.exchange,
        whole,
    )


class _Laid(NamedTuple):
    """All sequences of a batch, and what was chosen for them in how many seconds.

    The layout is that of the first sequence that is cut; the exchange suits the longest.
    """

    sequences: dict[str, Sequence]
    layout: str
    exchange: str | Schedule
    seconds: float


def _laid(
    values: Mapping[str, Any], found: Mapping[str, Fields], rules: Rules, rank: int, world: int
) -> _Laid:
    """Lay out all sequences."""
    made: dict[str, Sequence] = {}
    choices, seconds = [], 0.0
    taken = [Sizes((x.length,) * world, x.batch) for x in found.values() if x.whole]
    packed = any(fields.called("position_ids") for fields in found.values())
    for name, fields in found.items():
        single = rules.documents == "position_ids" and packed and not fields.called("position_ids")
        sequence = Sequence(
            layout=_whole(fields.length, rank, world),
            length=fields.length,
            batch=fields.batch,
            documents=None if single or fields.whole else find_documents(values, fields, rules),
            as_transformers=rules.as_transformers and rules.documents == "auto",
            keys=_padding(values, fields),
            whole=fields.whole,
        )
        if not fields.whole:
            start = perf_counter()
            choice, layout = lay_out(fields, sequence.documents, rules, world)
            choices.append(choice if isinstance(choice, str) else choice.name)
            sequence = replace(sequence, layout=layout)
            if sequence not in made.values():
                multiple = rules.pad_to_multiple_of or 1
                layout = told_apart(layout, fields.batch, taken, multiple=multiple)
                sequence = replace(sequence, layout=layout)
                taken.append(Sizes(layout.sizes, fields.batch))
            seconds += perf_counter() - start
        made[name] = sequence
    start = perf_counter()
    name = max((name for name in made if not made[name].whole), key=lambda x: made[x].length)
    longest = made[name]
    exchange = exchange_of(longest.layout, found[name], longest.documents, rules)
    return _Laid(made, choices[0], exchange, seconds + perf_counter() - start)


def _whole(length: int, rank: int, world: int) -> Layout:
    """The layout of a sequence as `rank` sees it that holds all of it, as its peers do."""
    return Layout(length, tuple(((0, length),) * (peer == rank) for peer in range(world)))


def _places(batch: Any, values: Mapping[str, Any], fields: Fields) -> tuple[str, ...]:
    """Names of the positions that a batch lacks: beside its tokens, or beside its first field.

    A mapping takes another key, and a dataclass one that it has and that is None.
    """
    tokens = [*fields.called("input_ids"), *fields.called("inputs_embeds")]
    if fields.name != MAIN:  # a flat batch of several has no place for those of each
        tokens = [name for name in tokens if last(name) in ("input_ids", "inputs_embeds")]
    elif not tokens:
        tokens = list(fields.dims)[:1]
    found = []
    for token in tokens:
        parent = token.rpartition(".")[0]
        container: Any = batch
        for key in parent.split(".") if parent else ():
            container = {str(k): v for k, v in (children(container) or {}).items()}[key]
        place = join(parent, "position_ids")
        free = isinstance(container, Mapping) or place in values
        if free and values.get(place) is None:
            found.append(place)
    return tuple(dict.fromkeys(found))


def lay_out(
    fields: Fields, documents: Documents | None, rules: Rules, world: int
) -> tuple[str | Balanced, Layout]:
    """Which layout a sequence has, and that layout: real tokens, then dummies.

    Args:
        fields: length and rows of the batch.
        documents: of its rows.
        rules: how to cut.
        world: size of the group.

    Raises:
        BatchError: if rows hold different documents and the layout places them.
    """
    own = rows_of(documents)
    by_document = isinstance(rules.layout, Balanced) or rules.layout in DOCUMENT_LAYOUTS
    if own and by_document:
        name = rules.layout if isinstance(rules.layout, str) else rules.layout.name
        raise BatchError(
            f"layout={name!r} places the documents of a row, and the {fields.batch} rows of this "
            f"batch hold different documents; pass one row per batch (pack the rows into one), or "
            f"use layout='zigzag'"
        )
    lengths = _lengths(fields, documents)
    padding = Padding(MIN_ROWS, rules.pad_to_multiple_of or 1)
    work = rules.work or Causal()

    def made(choice: str | Balanced) -> Layout:
        return layout_of(choice, lengths, world, work=work, padding=padding)

    if not rules.adaptive or len(lengths) == 1:
        return rules.layout, made(rules.layout)
    choices = (rules.layout, "balanced")
    layouts = tuple(map(made, choices))
    best = quickest(layouts, rules.exchanges, lengths, work, rules.calls).layout
    return choices[best], layouts[best]


def exchange_of(
    layout: Layout, fields: Fields, documents: Documents | None, rules: Rules
) -> str | Schedule:
    """How keys and values of a sequence travel.

    Args:
        layout: of the sequence.
        fields: length and rows of the batch.
        documents: of its rows.
        rules: which exchanges there are to choose from.
    """
    if len(rules.exchanges) == 1 or not rules.calls:
        return rules.exchanges[0]
    lengths, work = _lengths(fields, documents), rules.work or Causal()
    calls = tuple(call._replace(batch=fields.batch) for call in rules.calls)
    return quickest((layout,), rules.exchanges, lengths, work, calls).exchange


def _lengths(fields: Fields, documents: Documents | None) -> tuple[int, ...]:
    """Tokens of every document that all rows have; of one where they have their own."""
    own = rows_of(documents)
    edges = (0, fields.length) if own or documents is None else cast(Edges, documents)
    return tuple(stop - start for start, stop in pairwise(edges))


def _filled(tensor: Tensor, dim: int, length: int, value: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def _padding(values: Mapping[str, Any], fields: Fields) -> tuple[Span, ...] | None:
    """The run of real tokens in every row, from `attention_mask`; None where nothing is padded."""
    found = {name: _runs(name, values[name], fields) for name in fields.called("attention_mask")}
    if len(set(found.values())) > 1:
        raise BatchError(
            f"the masks {', '.join(found)} hide different tokens, but they belong to one sequence; "
            f"pass one attention_mask"
        )
    return next(iter(found.values()), None)


def _runs(name: str, mask: Tensor, fields: Fields) -> tuple[Span, ...] | None:
    if mask.ndim != 2:
        raise BatchError(
            f"{name} of shape {tuple(mask.shape)}: context parallelism takes the padding "
            f"[B, S]; causality comes from the attention call, documents are declared"
        )
    runs: list[Span] = []
    for row, visible in enumerate((mask != 0).cpu()):
        found = visible.nonzero().flatten().tolist()
        run = (found[0], found[-1] + 1) if found else (0, 0)
        if run[1] - run[0] != len(found):
            raise BatchError(
                f"{name} of row {row} hides positions between visible ones; only padding "
                f"on the left and on the right is supported"
            )
        runs.append(run)
    return None if set(runs) == {(0, fields.length)} else tuple(runs)
