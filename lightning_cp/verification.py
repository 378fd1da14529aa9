"""`verify`: run one step with and without context parallelism and say where they part."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_cp.api import ContextParallel, Shard
from lightning_cp.comm.alone import OneDevice
from lightning_cp.comm.failure import forget, report
from lightning_cp.comm.gather import gather_objects
from lightning_cp.compat import default_world
from lightning_cp.context import SLOT
from lightning_cp.data import find_fields
from lightning_cp.data.containers import items, rebuilt
from lightning_cp.data.valid import valid_tokens
from lightning_cp.diagnostics.audit import Audit
from lightning_cp.diagnostics.verify import Report, Run, judge, run, step_of, unchanged
from lightning_cp.diagnostics.verify.snapshot import (
    changed_parameters,
    parameter_versions,
    without_dropout,
)
from lightning_cp.errors import (
    ConfigError,
    ContextParallelError,
    ContextParallelWarning,
    MismatchError,
    RefusedError,
)
from lightning_cp.fsdp import is_sharded
from lightning_cp.logs import Logged, reduced_of
from lightning_cp.mesh import build_mesh
from lightning_cp.topology import Topology

MAX_TOKENS = 512
PATIENCE = timedelta(seconds=120)
"""How long the ranks of a verification wait for each other."""


def verify(
    module: nn.Module,
    batch: Any,
    *,
    parallel: ContextParallel | None = None,
    step: Callable[[Any], Any] | None = None,
    max_tokens: int = MAX_TOKENS,
    show: bool = True,
) -> Report:
    """Run one short step with and without context parallelism and compare everything in it.

    Every rank passes the same module (equal parameters) and the same whole batch. Each first runs
    the step as one device would, on the whole batch; then all run it together, each on its part.
    Compared are the inputs and outputs of every module at this rank's positions, the loss, the
    gradient of every parameter (the mean over ranks), logged values and the number of attention
    calls. The report names the first module whose inputs agree and whose outputs differ.

    Nothing is left behind: buffers, gradients, metrics, training flags and random numbers are put
    back, and no optimizer steps; under manual optimization only forward and loss are run. Dropout
    is off for both runs.

    Args:
        module: the model, or a LightningModule.
        batch: a whole batch; see `ContextParallel.shard`.
        parallel: how to run in parallel; where None, all ranks of the default process group are
            one context-parallel group with the default options.
        step: takes a batch and returns a loss, a mapping with a "loss", an object with a `loss`, or
            tensors; where None the module's `training_step`, else its forward (with a mapping as
            keyword arguments).
        max_tokens: only so many tokens of every row are used.
        show: print the table on the first rank.

    Returns:
        The report, the same on every rank.

    Raises:
        ConfigError: without two or more ranks.
        BatchError: if the batch cannot be cut.
        MismatchError: if the ranks' batches or parameters differ.
    """
    with _parallel(module, parallel) as own:
        _check_parameters(module, own)
        found = _verify(module, batch, own, step or step_of(module), max_tokens)
        if show and own.rank == 0:
            Console().print(found.table())
    return found


def _verify(
    module: nn.Module,
    batch: Any,
    parallel: ContextParallel,
    step: Callable[[Any], Any],
    max_tokens: int,
) -> Report:
    short, tokens = shortened(batch, parallel, module, max_tokens)
    versions = parameter_versions(module)
    with unchanged(module):
        rates = without_dropout(module)
        with unchanged(module):
            plain = run(module, step, short, under=OneDevice())
        shard = parallel.shard(short, module=module, stage="verify")
        shard.digest.wait()
        with unchanged(module):
            several = _run_on(shard, module, step, parallel)
        several.attention = shard.context.log.attention
        several.logs = _together(several.logs, shard, parallel)
        with unchanged(module):
            audited = _audit(shard, module, step)
    facts = {
        "ranks": str(parallel.world),
        "tokens per row": tokens,
        "layout, exchange": f"{shard.layout}, {shard.context.exchange}",
        "dropout": f"{rates} rates set to 0 in both runs",
    }
    if not getattr(module, "automatic_optimization", True):
        facts["optimization"] = "manual: forward and loss only, no gradients"
    found = judge(module, plain, several, context=shard.context, audited=audited, facts=facts)
    forget()
    changed = changed_parameters(module, versions)
    if changed:
        raise ContextParallelError(
            f"the step writes to parameters itself ({', '.join(changed[:3])}), which a "
            f"verification cannot put back; move that to a callback or to on_train_batch_end"
        )
    return found


def shortened(
    batch: Any, parallel: ContextParallel, module: nn.Module, max_tokens: int
) -> tuple[Any, str]:
    """The batch with at most `max_tokens` positions of a sequence, and how many, in words.

    Where the first position of a row is padding the last positions are kept, else the first.
    """
    share = parallel.share(module)
    found = find_fields(batch, share.rules.sequence_dims, decodes=share.rules.decodes)
    values, words = items(batch), []
    for fields in found.values():
        kept = min(fields.length, max_tokens)
        words.append(f"{kept} of {fields.length}" if kept < fields.length else str(kept))
        mask = next((values[name] for name in fields.called("attention_mask")), None)
        left = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].all())
        start = fields.length - kept if left else 0
        for name, dim in fields.dims.items() if kept < fields.length else ():
            values[name] = values[name].narrow(dim, start, kept).contiguous()
    return rebuilt(batch, values), "; ".join(words)


@contextmanager
def _parallel(module: nn.Module, given: ContextParallel | None) -> Iterator[ContextParallel]:
    """The given group, or one of all ranks for the time of the verification."""
    if given is not None:
        yield given
        return
    world = default_world()
    if world < 2:
        raise ConfigError(
            f"verify compares one device with several, but there are {world} ranks; start the "
            f"script with two or more (torchrun --nproc-per-node 2), or run "
            f"'lightning-cp verify FILE.py:FUNCTION', which starts them"
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    topology = Topology.resolve(world=world, local_world=world, cp=world, dp=1)
    mesh = build_mesh(topology, device=device, timeout=PATIENCE)
    own = ContextParallel(
        mesh.cp,
        a2a=mesh.cp_a2a,
        meta=mesh.meta,
        rank=mesh.coordinates.cp,
        world=world,
        device_type=device.type,
    )
    try:
        yield own
    finally:
        own.close()
        SLOT.forget(mesh.cp)
        mesh.close()


def _check_parameters(module: nn.Module, parallel: ContextParallel) -> None:
    """Ranks with other parameters would compute something else on one device already."""
    if is_sharded(module):
        return  # there is one of each, in parts
    sums = {name: float(x.detach().double().sum()) for name, x in module.named_parameters()}
    found = gather_objects(sums, group=parallel.meta)
    for name, value in found[0].items():
        values = [other.get(name) for other in found]
        if any(other != value for other in values):
            raise MismatchError(
                f"parameter {name!r} differs between ranks (sums {values}); build the module from "
                f"one seed on every rank, or load the same checkpoint, before it is verified"
            )


def _run_on(
    shard: Shard, module: nn.Module, step: Callable[[Any], Any], parallel: ContextParallel
) -> Run:
    averages = parallel.config.loss == "token_mean"
    try:
        return run(
            module,
            step,
            shard.batch,
            under=SLOT.activate(shard.context),
            finish=partial(parallel.token_mean, shard) if averages else None,
            catch=True,
        )
    except BaseException as error:
        report(error)  # peers that wait for this rank can then say why it does not come
        raise


def _together(
    logs: Mapping[str, Logged], shard: Shard, parallel: ContextParallel
) -> dict[str, Logged]:
    """What the group logs, of the names that every rank logged."""
    try:
        weight = valid_tokens(shard.cut, rank=parallel.rank)
    except RefusedError:
        weight = math.nan
    everyone = gather_objects((dict(logs), weight), group=parallel.meta)
    common = [name for name in logs if all(name in found for found, _ in everyone)]
    weights = [each for _, each in everyone]
    return {name: reduced_of([found[name] for found, _ in everyone], weights) for name in common}


def _audit(shard: Shard, module: nn.Module, step: Callable[[Any], Any]) -> list[str]:
    """What the audit of a first step says: refusals and warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Audit(shard.context):
            found = run(module, step, shard.batch, under=SLOT.activate(shard.context), catch=True)
    messages = [str(x.message) for x in said if issubclass(x.category, ContextParallelWarning)]
    return messages if found.error is None else [*messages, str(found.error)]
