"""Running a step once and remembering what went into and came out of every module."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from lightning_cp.context import SLOT
from lightning_cp.diagnostics.verify.manual import by_hand, recorded_logs
from lightning_cp.errors import PeerError
from lightning_cp.fsdp import full, settle
from lightning_cp.logs import Logged

Tensors = dict[str, Tensor]
Key = tuple[str, int]
"""Qualified name of a module, and how often it was called before."""


class Call(NamedTuple):
    """One call of a module.

    Attributes:
        inputs: its tensors, by their place among the arguments.
        outputs: the tensors that it returned.
        line: where it was called, as `file:line`; empty where the caller is not Python code.
    """

    inputs: Tensors
    outputs: Tensors
    line: str


@dataclass
class Run:
    """What one run of a step left behind.

    Attributes:
        calls: of every module, in the order in which they returned.
        entered: when each call began, counted over all of them.
        open: the modules that had not returned when the step failed, outermost first.
        losses: what the step returned, or what it passed to `manual_backward`.
        outputs: tensors that a step returned beside the loss.
        gradients: by name of the parameter, None where it got none.
        logs: scalars that the step logged, the last value of every name.
        attention: number of attention calls.
        error: what stopped the step.
    """

    calls: dict[Key, Call] = field(default_factory=dict)
    entered: dict[Key, int] = field(default_factory=dict)
    open: list[Key] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    outputs: Tensors = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    logs: dict[str, Logged] = field(default_factory=dict)
    attention: int = 0
    error: Exception | None = None


def run(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    under: AbstractContextManager[Any],
    finish: Callable[[Tensor], Tensor] | None = None,
    catch: bool = False,
) -> Run:
    """Run forward and backward of a step and record it.

    Args:
        module: the root module, whose gradients are None when this returns.
        step: takes the batch; returns a loss, a mapping with a "loss", an object with a `loss`, or
            tensors.
        batch: what to pass.
        under: entered around forward and backward.
        finish: what becomes of the loss that the step returns.
        catch: record an exception of the step in place of raising it.
    """
    found = Run()
    for parameter in module.parameters():
        parameter.grad = None
    before = SLOT.plain_attention
    try:
        with under, torch.enable_grad():
            with (
                _recording(module, found),
                recorded_logs(module, found.logs),
                by_hand(module, found.losses) as manual,
            ):
                output = step(batch)
            _take(output, found, finish)
            if not manual and found.losses and found.losses[-1].requires_grad:
                found.losses[-1].backward()
    except PeerError:
        raise
    except Exception as error:
        if not catch:
            raise
        found.error = error
    found.attention = SLOT.plain_attention - before
    found.losses = [loss.detach().clone() for loss in found.losses]
    settle(module, failed=found.error is not None)
    for name, parameter in module.named_parameters():
        gradient, parameter.grad = parameter.grad, None
        found.gradients[name] = None if gradient is None else full(gradient)
    return found


def step_of(module: nn.Module) -> Callable[[Any], Any]:
    """The step of a module: its `training_step` with batch index 0, else its forward.

    A forward gets a mapping as keyword arguments, a tuple or list as positional ones.
    """
    training_step = getattr(module, "training_step", None)
    if callable(training_step):
        written = inspect.unwrap(training_step)  # a sharded module's step is wrapped, and bound
        known = written if inspect.ismethod(written) else training_step
        indices = len(inspect.signature(known).parameters) - 1
        return lambda batch: training_step(batch, *[0] * max(indices, 0))

    def forward(batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return module(**batch)
        return module(*batch) if isinstance(batch, tuple | list) else module(batch)

    return forward


def _take(output: Any, found: Run, finish: Callable[[Tensor], Tensor] | None) -> None:
    """Sort what a step returned into a loss and other tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        found.losses.append(loss if finish is None else finish(loss))
    elif output is not None:
        found.outputs = _tensors(output, copied=True)


def _tensors(value: Any, *, copied: bool) -> Tensors:
    if hasattr(value, "to_tuple"):  # outputs of transformers
        value = dict(value)
    leaves, _ = tree_flatten_with_path(value)
    return {
        "".join(map(str, path)): full(leaf.detach()).clone() if copied else full(leaf.detach())
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    }


@contextmanager
def _recording(module: nn.Module, found: Run) -> Iterator[None]:
    """Hooks on every module for the time of a forward."""
    counts: Counter[str] = Counter()
    waiting: list[tuple[Key, Tensors, str]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            key = (name, counts[name])
            counts[name] += 1
            found.entered[key] = len(found.entered)
            found.open.append(key)
            waiting.append((key, _tensors((args, kwargs), copied=True), _line()))

        return hook

    def leave(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        key, inputs, line = waiting.pop()
        found.open.pop()
        found.calls[key] = Call(inputs, _tensors(output, copied=True), line)

    hooks: list[Any] = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks.append(part.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _line() -> str:
    """File and line of the code that called the module whose hook is running."""
    frame: FrameType | None = sys._getframe(1)
    inside = str(Path(torch.__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(inside):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
