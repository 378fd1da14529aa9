"""Trackers: live bytes of activations, and the calls of the communication library.

Both look inside this package's own operators, which are opaque to other dispatch modes.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp import attention, loss
from lightning_cp.compat import group_name
from lightning_cp.functional import operators


class _Inside(TorchDispatchMode, ABC):
    """A dispatch mode that stays on inside the operators that communicate."""

    _inside: dict[Any, Callable[..., Any]] = {  # noqa: RUF012  (a constant table)
        torch.ops.lightning_cp.attention.default: attention.forward_implementation,
        torch.ops.lightning_cp.attention_backward.default: attention.backward_implementation,
        torch.ops.lightning_cp.token_sums.default: loss.forward_implementation,
        torch.ops.lightning_cp.token_sums_backward.default: loss.backward_implementation,
        torch.ops.lightning_cp.element_sums.default: loss.elements_implementation,
        torch.ops.lightning_cp.element_sums_backward.default: loss.elements_backward_implementation,
        **{
            getattr(torch.ops.lightning_cp, name).default: implementation
            for name, implementation in operators.COMMUNICATING.items()
        },
    }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and look at it."""
        kwargs = kwargs or {}
        implementation = self._inside.get(func)
        if implementation is not None:
            with self:
                return implementation(*args, **kwargs)
        found = func(*args, **kwargs)
        self._look(func, args, kwargs, found)
        return found

    @abstractmethod
    def _look(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        """Look at an operator that has run, and at what it returned."""


class MemoryTracker(_Inside):
    """Peak of live tensor-storage bytes created while it is on.

    Put it around forward and backward. What existed before (parameters, the batch) does not count;
    a gradient stops counting when it has been accumulated into its parameter.

    Args:
        parameters: parameters whose gradients are not activations.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[int, Any]] = {}
        self._known: set[int] = set()
        self._parameters = list(parameters)
        self._hooks: list[Any] = []
        self.current = 0
        self.peak = 0

    def __enter__(self) -> "MemoryTracker":
        """Start looking; nested entries are for this class itself."""
        if not self._hooks:
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._exclude)
                for p in self._parameters
                if p.requires_grad
            ]
            self._known = {self._key(p) for p in self._parameters}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def close(self) -> None:
        """Remove the hooks on the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        existing = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                key = self._key(tensor)
                if key not in existing and key not in self._live and key not in self._known:
                    self._add(key, tensor.untyped_storage())

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._drop(key))
        self._live[key] = (size, reference)
        self.current += size
        self.peak = max(self.peak, self.current)

    def _drop(self, key: int) -> None:
        size, _ = self._live.pop(key, (0, None))
        self.current -= size

    def _exclude(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._drop(self._key(parameter.grad))

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)


class CollectiveCall(NamedTuple):
    """One call of the communication library: its name, the bytes of its tensors, its group."""

    name: str
    size: int
    group: str = ""


class CollectiveRecorder(_Inside):
    """Every `c10d` call, point-to-point included, in the order in which it was issued.

    Attributes:
        calls: what was called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Any) -> None:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args[:1]) if isinstance(x, Tensor)]
            size = sum(x.nbytes for x in tensors)
            groups = [name for x in tree_leaves(args) if (name := group_name(x)) is not None]
            self.calls.append(CollectiveCall(func.overloadpacket.__name__, size, *groups[:1]))

    def total(self, *names: str) -> int:
        """Bytes of all calls with one of these names."""
        return sum(call.size for call in self.calls if call.name in names)
