"""What a step may ask of its Trainer, answered without a trace: logs and manual optimization."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_cp.logs import Logged, reduction_of


@contextmanager
def recorded_logs(module: nn.Module, logs: dict[str, Logged]) -> Iterator[None]:
    """Record the scalars that a step logs with `self.log`, in place of logging them.

    Args:
        module: a LightningModule, or any module.
        logs: filled with the last value of every key.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            value = value.detach() if isinstance(value, Tensor) else value
            number = float(value) if isinstance(value, float) or _is_float(value) else int(value)
            kind = reduction_of(kwargs.get("reduce_fx", "mean")) or "mean"
            logs[name] = Logged(name, number, kind, kwargs.get("batch_size"))

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, **kwargs)

    with _replaced(module, {"log": log, "log_dict": log_dict}):
        yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def by_hand(module: nn.Module, losses: list[Tensor]) -> Iterator[bool]:
    """Let a step under manual optimization run its forward and nothing else.

    Its optimizers and schedulers do nothing, and what it passes to `manual_backward` is recorded.

    Args:
        module: a LightningModule, or any module.
        losses: filled with the losses.

    Yields:
        Whether the module optimizes by hand.
    """
    if getattr(module, "automatic_optimization", True):
        yield False
        return

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    names = ("clip_gradients", "toggle_optimizer", "untoggle_optimizer")
    idle: dict[str, Any] = dict.fromkeys(names, nothing)
    idle["manual_backward"] = lambda loss, *args, **kwargs: losses.append(loss.detach())
    attached = getattr(module, "_trainer", None) is not None
    for name in ("optimizers", "lr_schedulers"):
        if hasattr(module, name):
            ask = getattr(module, name) if attached else partial(_configured, module, name)
            idle[name] = _idle_ones(ask)
    with _replaced(module, idle):
        yield True


class _Idle:
    """An optimizer or scheduler whose steps do nothing; the rest is the real one's."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "zero_grad"):
            return lambda *args, **kwargs: None
        return getattr(self._real, name)


def _configured(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a module without a Trainer would get: its optimizers, and no schedulers."""
    if name == "lr_schedulers":
        return None
    given = module.configure_optimizers()  # type: ignore[operator]
    given = given[0] if isinstance(given, tuple) and isinstance(given[0], list) else given
    listed = list(given) if isinstance(given, list | tuple) else [given]
    found = [x["optimizer"] if isinstance(x, dict) else x for x in listed]
    return found[0] if len(found) == 1 else found


def _idle_ones(ask: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        real = ask(*args, **kwargs)
        return [_Idle(x) for x in real] if isinstance(real, list) else _Idle(real)

    return answer


@contextmanager
def _replaced(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Shadow methods of a module for a while; a module without them is left alone."""
    shadowed = {name: x for name, x in attributes.items() if hasattr(module, name)}
    before = {name: vars(module)[name] for name in shadowed if name in vars(module)}
    vars(module).update(shadowed)
    try:
        yield
    finally:
        for name in shadowed:
            del vars(module)[name]
        vars(module).update(before)
