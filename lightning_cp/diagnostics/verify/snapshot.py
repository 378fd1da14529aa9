"""Everything that a step may change, put back afterwards."""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KEPT = ("_parameters", "_modules", "_buffers")
"""Entries of a module that are looked after one by one."""

Undo = Callable[[], None]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back what the code inside changes: a look at a step that leaves no trace.

    Buffers, gradients, training flags, and the attributes of every submodule that are tensors,
    numbers or containers (which covers the states of metrics) are put back, in place where others
    may hold them, and so are the generators of random numbers. The contents of parameters are not
    copied; see `changed_parameters`.

    Args:
        module: the root module.
    """
    undo = [undo_random_numbers()]
    for part in module.modules():
        undo += [_undo_attributes(part), *(_undo_tensor(x) for x in part.buffers(recurse=False))]
    undo += [_undo_gradient(parameter) for parameter in module.parameters()]
    try:
        yield
    finally:
        for call in undo:
            call()


def changed_parameters(module: nn.Module, versions: dict[str, int]) -> list[str]:
    """Names of parameters that were written to since `parameter_versions`."""
    return [name for name, x in module.named_parameters() if versions.get(name) != x._version]


def parameter_versions(module: nn.Module) -> dict[str, int]:
    """How often each parameter was written to."""
    return {name: x._version for name, x in module.named_parameters()}


def without_dropout(module: nn.Module) -> int:
    """Set every dropout rate to 0: float attributes between 0 and 1 of modules that name dropout.

    Call it inside `unchanged`, which puts the rates back.

    Returns:
        The number of rates.
    """
    found = 0
    for part in module.modules():
        for name, value in list(vars(part).items()):
            drops = "drop" in name.lower() or (name == "p" and "Dropout" in type(part).__name__)
            if drops and isinstance(value, float) and 0 < value <= 1:
                setattr(part, name, 0.0)
                found += 1
    return found


def undo_random_numbers() -> Undo:
    """Remember the default generators of torch, Python and NumPy; calling it puts them back."""
    numpy = sys.modules.get("numpy")
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    arrays = numpy.random.get_state() if numpy is not None else None

    def undo() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(arrays)

    return undo


def _undo_attributes(part: nn.Module) -> Undo:
    before = {name: value for name, value in vars(part).items() if name not in KEPT}
    buffers = dict(part._buffers)
    values = [_undo_value(value) for name, value in before.items() if not name.startswith("__")]

    def undo() -> None:
        for name in [name for name in vars(part) if name not in KEPT and name not in before]:
            del vars(part)[name]
        vars(part).update(before)
        part._buffers.clear()
        part._buffers.update(buffers)
        for call in values:
            call()

    return undo


def _undo_value(value: Any) -> Undo:
    """Puts back the contents of a tensor or of a container; the object stays the same."""
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if isinstance(value, dict):
        inside, pairs = _inside(value.values()), dict(value)
        return lambda: _each(inside, value.clear, lambda: value.update(pairs))
    if isinstance(value, list):
        inside, items = _inside(value), list(value)
        return lambda: _each(inside, value.clear, lambda: value.extend(items))
    if isinstance(value, set):
        members = copy.copy(value)
        return lambda: _each([], value.clear, lambda: value.update(members))
    return lambda: None


def _inside(values: Iterable[Any]) -> list[Undo]:
    return [_undo_value(x) for x in values if isinstance(x, Tensor | dict | list | set)]


def _each(inside: list[Undo], *calls: Undo) -> None:
    for call in (*inside, *calls):
        call()


def _undo_tensor(tensor: Tensor) -> Undo:
    if isinstance(tensor, nn.Parameter):
        return lambda: None
    saved = tensor.detach().clone()
    version = None if tensor.is_inference() else tensor._version

    def undo() -> None:
        if version is None or tensor._version != version:
            with torch.no_grad():
                tensor.detach().copy_(saved)

    return undo


def _undo_gradient(parameter: nn.Parameter) -> Undo:
    gradient = parameter.grad
    contents = _undo_tensor(gradient) if gradient is not None else None

    def undo() -> None:
        parameter.grad = gradient
        if contents is not None:
            contents()

    return undo
