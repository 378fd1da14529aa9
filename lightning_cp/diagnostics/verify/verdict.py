"""From two runs to a verdict: which module is the first to differ, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.gather import gather_objects
from lightning_cp.comm.reduce import sum_
from lightning_cp.context import Context
from lightning_cp.diagnostics.verify.align import TOLERANCES, coarsest, furthest, relative
from lightning_cp.diagnostics.verify.causes import cause_of
from lightning_cp.diagnostics.verify.record import Key, Run
from lightning_cp.diagnostics.verify.report import Compared, Finding, Report
from lightning_cp.logs import Logged

SMALL = 1e-3
"""A gradient counts as at least this part of the largest one: theory makes some of them 0."""


@dataclass
class Evidence:
    """What the ranks found, the worst of all ranks; errors are in units of what rounding explains.

    Attributes:
        inputs: error of the inputs of every call.
        outputs: error of the outputs of every call.
        loss: error of the losses.
        logs: error of every logged value.
        error: what stopped the run with context parallelism, on the first rank that it stopped.
        open: calls that had not returned by then.
    """

    inputs: dict[Key, float]
    outputs: dict[Key, float]
    loss: float
    logs: dict[str, float]
    error: str
    open: list[Key]


def judge(
    module: nn.Module,
    plain: Run,
    parallel: Run,
    *,
    context: Context,
    audited: list[str],
    facts: Mapping[str, str],
) -> Report:
    """Compare two runs of one step over the group; the same report on every rank.

    Args:
        module: the root module.
        plain: the run on the whole batch, as on one device.
        parallel: the run on this rank's part.
        context: what it ran under.
        audited: what the audit said of the step.
        facts: further rows of the table.
    """
    evidence = _worst(gather_objects(_evidence(plain, parallel, context), group=context.meta))
    gradients = _gradients(plain, parallel, context) if not evidence.error else {}
    compared = Compared(
        calls=len(plain.calls),
        output=max(evidence.outputs.values(), default=0.0),
        loss=(_number(plain), _number(parallel)),
        gradients=gradients,
        logs=evidence.logs,
        attention=(plain.attention, parallel.attention),
    )
    finding = _finding(module, plain, evidence, compared, audited)
    return Report(finding=finding, compared=compared, facts=dict(facts))


def _evidence(plain: Run, parallel: Run, context: Context) -> Evidence:
    inputs, outputs = {}, {}
    for key, whole in plain.calls.items():
        part = parallel.calls.get(key)
        if part is not None:
            inputs[key] = furthest(whole.inputs, part.inputs, context)
            outputs[key] = furthest(whole.outputs, part.outputs, context)
        elif parallel.error is None:
            inputs[key], outputs[key] = 0.0, float("inf")
    stopped = parallel.error is not None
    loss = 0.0
    if not stopped:
        named = [{str(i): x for i, x in enumerate(run.losses)} for run in (plain, parallel)]
        loss = furthest(named[0], named[1], context)
        loss = max(loss, furthest(plain.outputs, parallel.outputs, context))
        if len(plain.losses) != len(parallel.losses):
            loss = float("inf")
    logs = {
        name: relative(_double(parallel.logs[name]), _double(x), 1e-6) / TOLERANCES[torch.float32]
        if name in parallel.logs
        else float("inf")
        for name, x in plain.logs.items()
        if not stopped
    }
    error = f"{type(parallel.error).__name__}: {parallel.error}" if stopped else ""
    return Evidence(inputs, outputs, loss, logs, error, list(parallel.open))


def _double(logged: Logged) -> Tensor:
    return torch.tensor(float(logged.value), dtype=torch.float64)


def _worst(found: list[Any]) -> Evidence:
    first: Evidence = found[0]
    for other in found[1:]:
        for mine, theirs in (
            (first.inputs, other.inputs),
            (first.outputs, other.outputs),
            (first.logs, other.logs),
        ):
            for key, error in theirs.items():
                mine[key] = max(mine.get(key, 0.0), error)
        first.loss = max(first.loss, other.loss)
        if not first.error:
            first.error, first.open = other.error, other.open
    return first


def _gradients(plain: Run, parallel: Run, context: Context) -> dict[str, float]:
    """Error of the mean over ranks of every parameter's gradient."""
    largest = max(
        (float(x.abs().max()) for x in plain.gradients.values() if x is not None and x.numel()),
        default=0.0,
    )
    passed = (x for call in plain.calls.values() for x in call.outputs.values())
    computed = coarsest([*plain.losses, *passed])  # a gradient is as exact as what it came through
    errors = {}
    for name, expected in plain.gradients.items():
        mean = _mean(parallel.gradients[name], expected, context)
        if mean is not None:
            whole = torch.zeros_like(mean) if expected is None else expected
            limit = max(TOLERANCES.get(whole.dtype, 1e-12), computed)
            errors[name] = relative(mean, whole, SMALL * largest) / limit
    return errors


def _mean(found: Tensor | None, expected: Tensor | None, context: Context) -> Tensor | None:
    """Mean over the group; None where no rank and no single device has a gradient."""
    given = torch.tensor([float(found is not None)])
    sum_(given, group=context.meta)
    if not bool(given):
        return expected if expected is None else torch.zeros_like(expected)
    template = found if found is not None else expected
    if template is None:
        return None
    total = torch.zeros_like(template) if found is None else found.clone()
    return sum_(total, group=context.group) / context.world


def _number(run: Run) -> float | None:
    return float(run.losses[-1]) if run.losses else None


def _finding(
    module: nn.Module,
    plain: Run,
    evidence: Evidence,
    compared: Compared,
    audited: list[str],
) -> Finding | None:
    """The first fault: a module, the step itself, a gradient or a logged value; None if right."""
    key = next(
        (
            key
            for key in plain.calls
            if evidence.inputs.get(key, 2.0) <= 1 < evidence.outputs.get(key, 0.0)
        ),
        None,
    )
    if key is None and evidence.error:
        key = evidence.open[-1] if evidence.open else ("", 0)
        return _found(module, key, plain, evidence, audited, f"the step stopped: {evidence.error}")
    if key is not None:
        what = f"inputs agree, outputs differ ({evidence.outputs[key]:.3g} x the tolerance)"
        return _found(module, key, plain, evidence, audited, what)
    if evidence.loss > 1:
        what = f"every module agrees, the loss differs ({evidence.loss:.3g} x the tolerance)"
        return _found(module, ("", 0), plain, evidence, audited, what)
    wrong = {name: error for name, error in compared.gradients.items() if error > 1}
    if wrong:
        return _of_gradients(module, plain, wrong, audited)
    logged = [name for name, error in compared.logs.items() if error > 1]
    if logged:
        what = f"everything agrees but the logged value {logged[0]!r}"
        return _found(module, ("", 0), plain, evidence, audited, what)
    if compared.attention[1] < compared.attention[0]:
        what = "everything agrees, but attention calls are missing"
        return _found(module, ("", 0), plain, evidence, audited, what)
    return None


def _found(
    module: nn.Module,
    key: Key,
    plain: Run,
    evidence: Evidence,
    audited: list[str],
    what: str,
) -> Finding:
    part = module.get_submodule(key[0])
    after = _first_inside(key, plain, evidence)
    line = plain.calls[after].line if after else ""
    if not line and key in plain.calls:
        line = plain.calls[key].line
    if after:
        what += f"; the first wrong value enters '{after[0]}'"
    title = type(part).__name__
    return Finding(key[0], title, line, what, *cause_of(part, key[0], what, audited))


def _first_inside(key: Key, plain: Run, evidence: Evidence) -> Key | None:
    """The first call inside a module's call that was given a wrong input."""
    start = plain.entered.get(key, -1)
    order = list(plain.calls)
    within = order[: order.index(key)] if key in plain.calls else order
    wrong = [
        other
        for other in within
        if plain.entered[other] > start and evidence.inputs.get(other, 0.0) > 1
    ]
    return min(wrong, key=lambda other: plain.entered[other]) if wrong else None


def _of_gradients(
    module: nn.Module, plain: Run, wrong: dict[str, float], audited: list[str]
) -> Finding:
    """Outputs agree and gradients do not: the last module of the forward is the first to blame."""
    order = {name: index for index, (name, _) in enumerate(plain.calls)}
    owners = {name: name.rpartition(".")[0] for name in wrong}
    name = max(wrong, key=lambda x: (order.get(owners[x], -1), wrong[x]))
    what = (
        f"outputs and loss agree, {len(wrong)} gradients differ, first that of {name!r} "
        f"({wrong[name]:.3g} x the tolerance)"
    )
    part = module.get_submodule(owners[name])
    title = type(part).__name__
    return Finding(owners[name], title, "", what, *cause_of(part, owners[name], what, audited))
