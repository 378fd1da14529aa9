"""What a function reads besides its arguments."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

Value = Tensor | int | float | str


class _Place(NamedTuple):
    """A value, where it was found, and which attributes of objects there are asked for."""

    where: str
    value: Any
    names: frozenset[str]


def captured(function: Callable[..., Any]) -> dict[str, Value]:
    """Tensors, numbers and texts that a function may read besides its arguments.

    Looked through are variables of enclosing functions, defaults, globals, arguments of partial
    functions, and of objects the attributes that its code names; then the functions found there.

    Returns:
        By where they were found, such as `documents` or `self.documents`.
    """
    found: dict[str, Value] = {}
    waiting, known = [_Place("", function, frozenset())], dict[tuple[int, frozenset[str]], Any]()
    while waiting:
        place = waiting.pop()
        key = id(place.value), place.names
        if isinstance(place.value, Tensor | int | float | str):
            found[place.where] = place.value
        elif key not in known:
            known[key] = place.value  # kept, so that nothing else gets its id
            waiting += _within(place)
    return found


def _within(place: _Place) -> Iterator[_Place]:
    """Where to look on, of a value that is no tensor, number or text."""
    where, value, names = place
    if isinstance(value, FunctionType):
        yield from _of_function(where, value)
    elif isinstance(value, MethodType):
        names = _names(value.__func__)
        yield _Place(where, value.__func__, names)
        yield _Place(_joined(where, "self"), value.__self__, names)
    elif isinstance(value, partial):
        for part in (value.func, value.args, value.keywords):
            yield _Place(where, part, names)
    elif isinstance(value, Mapping):
        yield from (_Place(f"{where}[{key!r}]", x, names) for key, x in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (_Place(f"{where}[{index}]", x, names) for index, x in enumerate(value))
    elif not isinstance(value, type | ModuleType):
        call = getattr_static(type(value), "__call__", None)
        if isinstance(call, FunctionType):
            yield _Place(where, call, frozenset())
            names |= _names(call)
        for name in sorted(names):
            yield _Place(_joined(where, name), getattr(value, name, None), names)


def _of_function(where: str, function: FunctionType) -> Iterator[_Place]:
    code, names = function.__code__, _names(function)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield _Place(_joined(where, name), _content(cell), names)
    count = code.co_argcount
    defaults = function.__defaults__ or ()
    given = dict(zip(code.co_varnames[count - len(defaults) : count], defaults, strict=True))
    for name, value in (given | (function.__kwdefaults__ or {})).items():
        yield _Place(_joined(where, name), value, names)
    for name in sorted(names & function.__globals__.keys()):
        yield _Place(_joined(where, name), function.__globals__[name], names)


def _names(function: Callable[..., Any]) -> frozenset[str]:
    """Globals and attributes that a function's code names; none of those of torch's own."""
    code = getattr(function, "__code__", None)
    if code is None or str(function.__module__).partition(".")[0] == "torch":
        return frozenset()
    return frozenset(_named(code))


def _named(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)


def _content(cell: CellType) -> Any:
    """What a variable holds, None where nothing has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
