"""What functions read besides their arguments."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, or_masks

from lightning_cp.swap.captured import captured

ONE, TWO, THREE = (torch.full((n,), n) for n in (1, 2, 3))


def by_global(q: Tensor) -> Tensor:
    def inner() -> Tensor:
        return TWO[q]

    return inner()


def by_default(q: Tensor, table: Tensor = ONE, *, other: Tensor = TWO) -> Tensor:
    return table[q] + other[q]


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("documents", ONE)
        self.parts = [SimpleNamespace(inner=THREE)]

    def method(self, q: Tensor) -> Any:
        return self.documents[q] + self.parts[0].inner

    def through(self, q: Tensor) -> Any:
        return self.method(q)


class Table:
    def __init__(self) -> None:
        self.other, self.unused = TWO, THREE

    def __call__(self, q: Tensor) -> Any:
        return self.other[q]


def closure(table: Tensor, size: int) -> Any:
    never: Any

    def mod(q: Tensor) -> Any:
        return table[q] * size if size else never

    if size < 0:
        never = 0
    return mod


def found(function: Any) -> dict[str, Any]:
    return {n: x.numel() if isinstance(x, Tensor) else x for n, x in captured(function).items()}


def test_everything_that_a_function_may_read() -> None:
    owner = Owner()
    assert found(closure(TWO, 5)) == {"table": 2, "size": 5}
    assert found(lambda q: closure(ONE, 1)(q)) == {"ONE": 1}
    assert found(by_global) == {"TWO": 2}
    assert found(by_default) == {"table": 1, "other": 2}
    assert found(partial(by_default, THREE, other=ONE)) == {
        "table": 1,
        "other": 2,
        "[0]": 3,
        "['other']": 1,
    }
    assert found(owner.method) == {"self.documents": 1, "self.parts[0].inner": 3}
    through = found(owner.through)
    assert {x for x in through.values() if x in (1, 3)} == {1, 3}
    assert found(Table()) == {"other": 2}
    both = or_masks(and_masks(closure(ONE, 7), by_global), lambda q: q)
    assert sorted(map(str, found(both).values())) == ["1", "2", "7"]


def test_what_refers_to_itself() -> None:
    def mod(q: Tensor) -> Any:
        return mod(q) + ONE + loop[0]

    loop: list[Any] = []
    loop.append(loop)
    assert set(found(mod).values()) == {1}
