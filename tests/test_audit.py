"""The audit finds positions that a model builds from its local length, and looks where it must."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import compat, functional
from lightning_cp.context import SLOT
from lightning_cp.diagnostics.audit import SMALLEST, mode
from lightning_cp.diagnostics.audit.rules import NAMES, RULES
from lightning_cp.errors import RefusedError
from tests._harness.audited import Calling, audited

SHARE = 4


def run(call: Callable[[], Tensor], *, share: int = SHARE, active: bool = True) -> Tensor:
    """The call inside module `embed.positions` on rank 0 of 2, each of which holds `share`."""
    found = audited(call, share=share, active=active, other=10)
    assert isinstance(found, Tensor)
    return found


ONES = torch.ones(3, SHARE)

FLAGGED: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: torch.arange(SHARE),
    "arange of another sequence": lambda: torch.arange(10),
    "arange from 0": lambda: torch.arange(0, SHARE),
    "arange from 0 by 1": lambda: torch.arange(0, SHARE, 1),
    "arange of float": lambda: torch.arange(float(SHARE)),
    "arange from 0.0 by 1.0": lambda: torch.arange(0.0, SHARE, 1.0),
    "arange that is not whole": lambda: torch.arange(SHARE - 0.5),
    "arange as float32": lambda: torch.arange(SHARE, dtype=torch.float32),
    "arange by keywords": lambda: torch.arange(start=0, end=SHARE, device="cpu"),
    "linspace": lambda: torch.linspace(0, 1, SHARE),
    "arange into": lambda: torch.arange(SHARE, out=torch.empty(SHARE, dtype=torch.int64)),
    "cumsum": lambda: torch.ones(SHARE).cumsum(0),
    "cumsum of int": lambda: torch.ones(SHARE, dtype=torch.int64).cumsum(0),
    "cumsum of rows": lambda: ONES.cumsum(1),
    "cumsum of rows from the end": lambda: ONES.cumsum(-1),
    "cumsum by keyword": lambda: torch.cumsum(ONES, dim=-1),
    "cumsum in place": lambda: ONES.clone().cumsum_(1),
    "cumprod": lambda: ONES.cumprod(1),
    "logcumsumexp": lambda: ONES.logcumsumexp(1),
    "cummax": lambda: ONES.cummax(1).values,
    "cummin": lambda: ONES.cummin(1).values,
}

PASSED: dict[str, Callable[[], Tensor]] = {
    "arange of something else": lambda: torch.arange(SHARE + 1),
    "arange from 1": lambda: torch.arange(1, SHARE + 1),
    "arange from 1 to the share": lambda: torch.arange(1, SHARE),
    "arange by 2": lambda: torch.arange(0, 2 * SHARE, 2),
    "arange by 2 to the share": lambda: torch.arange(0, SHARE, 2),
    "arange backwards": lambda: torch.arange(SHARE - 1, -1, -1),
    "arange of nothing": lambda: torch.arange(0),
    "arange by less than 1": lambda: torch.arange(0, SHARE, 0.5),
    "ones": lambda: torch.ones(SHARE),
    "cumsum over another dimension": lambda: ONES.cumsum(0),
    "linspace of something else": lambda: torch.linspace(0, 1, SHARE + 1),
    "cumprod over another dimension": lambda: ONES.cumprod(0),
    "cumsum of a scalar": lambda: torch.tensor(1.0).cumsum(0),
    "sum": lambda: ONES.sum(1),
    "positions": lambda: functional.positions(SHARE),
}


@pytest.mark.parametrize("call", FLAGGED.values(), ids=list(FLAGGED))
def test_positions_from_the_local_length_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(RefusedError) as caught:
        run(call)
    message = str(caught.value)
    assert message.startswith("module 'embed.positions' (Calling, audited.py:")
    size = 10 if call is FLAGGED["arange of another sequence"] else SHARE
    assert f"over {size} elements, the number of this rank's tokens" in message
    assert f"functional.positions({size})" in message
    assert "batch's position_ids" in message
    assert "functional.local()" in message
    running = "start anew" in message
    assert running == any(call is FLAGGED[name] for name in FLAGGED if name.startswith(RUNNING))
    assert ("use lightning_cp.functional.cumsum" in message) == ("torch.cumsum" in message)


RUNNING = ("cum", "logcum")


@pytest.mark.parametrize("call", FLAGGED.values(), ids=list(FLAGGED))
def test_inside_local_and_outside_a_context_nothing_is_refused(
    call: Callable[[], Tensor],
) -> None:
    def local() -> Tensor:
        with functional.local():
            return call()

    plain = call()
    assert torch.equal(run(local), plain)
    assert torch.equal(run(call, active=False), plain)


@pytest.mark.parametrize("call", PASSED.values(), ids=list(PASSED))
def test_other_calls_pass(call: Callable[[], Tensor]) -> None:
    if call is PASSED["positions"]:
        assert run(call).tolist() == [0, 1, 2, 3]
    else:
        assert torch.equal(run(call), call())


def test_the_line_is_the_models_own() -> None:
    """Whatever its first argument is called, not a line of torch's `Module.__call__`."""
    line = Calling.forward.__code__.co_firstlineno + 2
    with pytest.raises(RefusedError, match=rf"\(Calling, audited\.py:{line}\)"):
        run(FLAGGED["arange"])


def test_small_shares_are_not_told_apart() -> None:
    assert SMALLEST == 3
    assert run(lambda: torch.arange(2), share=2).tolist() == [0, 1]
    with pytest.raises(RefusedError):
        run(lambda: torch.arange(3), share=3)
    assert run(lambda: torch.arange(0), share=1).tolist() == []


def test_backwards_are_not_looked_at() -> None:
    """The gradient of a value spread over tokens is a sum over tokens; recomputation repeats."""
    x = torch.randn(1, SHARE, 8)
    scale = torch.ones(1, 8, requires_grad=True)

    def spread() -> Tensor:
        total = (x * scale.unsqueeze(1)).sum()
        total.backward()
        return total

    def recomputed() -> Tensor:
        with SLOT.suspend():
            total = checkpoint(lambda: (x * scale).cumsum(1).sum(), use_reentrant=False)
        total.backward()
        return total

    for call in (spread, recomputed):
        scale.grad = None
        run(call)
        assert scale.grad is not None
    with pytest.raises(RefusedError, match=r"torch\.cumsum over 4 elements"):
        run(lambda: checkpoint(lambda: (x * scale).cumsum(1).sum(), use_reentrant=False))
    assert not compat.in_backward()


def test_libraries_that_know_of_the_group_are_not_looked_at() -> None:
    knowing = ("torchmetrics.functional", "lightning.pytorch.utilities", "lightning_cp.functional")
    others = ("lightning.pytorch.demos.transformer", "lightning_extras", "torchvision", "user")
    for name in knowing + others:
        refused = name in others
        space: dict[str, Any] = {"__name__": name, "torch": torch}
        exec(f"def call():\n    return torch.arange({SHARE})", space)
        if refused:
            with pytest.raises(RefusedError):
                run(space["call"])
        else:
            assert run(space["call"]).tolist() == [0, 1, 2, 3]


def test_every_operator_of_the_table_is_known() -> None:
    """A name that torch does not have guards nothing."""
    names = " ".join(NAMES.values()).split()
    assert not [name for name in names if not hasattr(torch.ops.aten, name)]
    assert len(RULES) == len(names)


def test_looking_is_cheap() -> None:
    """What no rule knows costs one look into each table."""
    x = torch.ones(1, SHARE, 8)
    seen = []

    class Counting(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            seen.append(key)
            return super().__contains__(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mode, "RULES", Counting(RULES))
        patch.setattr(mode, "COLLECTIVES", Counting())
        run(lambda: x + 1)
    assert seen == [torch.ops.aten.add] * 2
