"""One call under the audit, in a module of a model on one rank of a group that is not there."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_cp.context import SLOT, Context
from lightning_cp.diagnostics.audit import Audit
from lightning_cp.layout import contiguous
from lightning_cp.sequences import Sequence


class Calling(nn.Module):
    """Does what the test asks for, in the forward."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call

    def forward(this) -> object:
        """What the call returns."""
        return this.call()


def audited(
    call: Callable[[], object],
    *,
    share: int,
    rows: int = 1,
    widths: tuple[int, ...] = (),
    kept: Tensor | None = None,
    active: bool = True,
    other: int = 0,
) -> object:
    """The call inside module `embed.positions` on rank 0 of 2, each of which holds `share`.

    Args:
        call: what is done.
        share: local tokens of a sequence of `rows` rows.
        rows: rows of the batch.
        widths: shape of a parameter of the model.
        kept: a parameter, or a buffer, of the module.
        active: whether the context is.
        other: local tokens of another sequence, of one row.

    Raises:
        RefusedError: if the audit refuses the call.
    """
    calling = Calling(call)
    root = nn.ModuleDict({"embed": nn.ModuleDict({"positions": calling})})
    if widths:
        root.register_parameter("weight", nn.Parameter(torch.zeros(widths)))
    if isinstance(kept, nn.Parameter):
        calling.register_parameter("kept", kept)
    elif kept is not None:
        calling.register_buffer("kept", kept)
    lengths = {2 * share: rows} | ({2 * other: 1} if other else {})
    context = Context(
        rank=0,
        world=2,
        group=None,
        meta=None,
        sequences={
            str(length): Sequence(layout=contiguous(length, 2), length=length, batch=batch)
            for length, batch in lengths.items()
        },
        exchange="ring",
        module=weakref.ref(root),
    )
    with SLOT.activate(context if active else None), Audit(context):
        return calling()
