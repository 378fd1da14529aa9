"""The audit finds positions that a model builds from its local length, and nothing else."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import functional
from lightning_cp.context import SLOT, Context, Sequence
from lightning_cp.diagnostics.audit import SMALLEST, Audit
from lightning_cp.errors import RefusedError
from lightning_cp.layout import contiguous, zigzag

SHARE = 4


class Numbering(nn.Module):
    """Does what the test asks for, in the forward."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(this) -> Tensor:
        return this.call()


def run(call: Callable[[], Tensor], *, share: int = SHARE, active: bool = True) -> Tensor:
    """The call inside module `embed.positions` on rank 0 of 2, each of which holds `share`."""
    root = nn.ModuleDict({"embed": nn.ModuleDict({"positions": Numbering(call)})})
    context = Context(
        rank=0,
        world=2,
        group=None,
        meta=None,
        sequences={
            "s": Sequence(layout=contiguous(2 * share, 2), length=2 * share, batch=1),
            "other": Sequence(layout=zigzag(20, 2), length=20, batch=1),
        },
        exchange="ring",
        module=weakref.ref(root),
    )
    with SLOT.activate(context if active else None), Audit(context):
        found: Tensor = root["embed"]["positions"]()
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
    "arange into": lambda: torch.arange(SHARE, out=torch.empty(SHARE, dtype=torch.int64)),
    "cumsum": lambda: torch.ones(SHARE).cumsum(0),
    "cumsum of int": lambda: torch.ones(SHARE, dtype=torch.int64).cumsum(0),
    "cumsum of rows": lambda: ONES.cumsum(1),
    "cumsum of rows from the end": lambda: ONES.cumsum(-1),
    "cumsum by keyword": lambda: torch.cumsum(ONES, dim=-1),
    "cumsum in place": lambda: ONES.clone().cumsum_(1),
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
    "cumsum of a scalar": lambda: torch.tensor(1.0).cumsum(0),
    "sum": lambda: ONES.sum(1),
    "positions": lambda: functional.positions(SHARE),
}


@pytest.mark.parametrize("call", FLAGGED.values(), ids=list(FLAGGED))
def test_positions_from_the_local_length_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(RefusedError) as caught:
        run(call)
    message = str(caught.value)
    assert message.startswith("module 'embed.positions' (Numbering, test_audit.py:")
    size = 10 if call is FLAGGED["arange of another sequence"] else SHARE
    assert f"over {size} elements, the number of this rank's tokens" in message
    assert f"use lightning_cp.functional.positions({size}), or the batch's position_ids" in message
    assert "functional.local()" in message


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
    line = Numbering.forward.__code__.co_firstlineno + 1
    with pytest.raises(RefusedError, match=rf"\(Numbering, test_audit\.py:{line}\)"):
        run(FLAGGED["arange"])


def test_small_shares_are_not_told_apart() -> None:
    assert SMALLEST == 3
    assert run(lambda: torch.arange(2), share=2).tolist() == [0, 1]
    with pytest.raises(RefusedError):
        run(lambda: torch.arange(3), share=3)
    assert run(lambda: torch.arange(0), share=1).tolist() == []
