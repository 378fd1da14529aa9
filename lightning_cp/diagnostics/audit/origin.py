"""Whose line of code a call comes from: the model's, or that of a library that knows better."""

import sys
from types import FrameType

PLUMBING = (
    "torch._compile",
    "torch._dynamo",
    "torch._library",
    "torch._ops",
    "torch.utils",
    "torch.autograd",
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
    "lightning_cp.diagnostics",
)
"""Modules between a collective and whoever wants it."""

EVERYTHING = ("torch", "lightning_cp.diagnostics")
"""Modules between an operator and the line that calls a function of torch."""

LIBRARIES = (
    "lightning_cp",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torchmetrics",
)
"""Packages that know of the group, or reduce over it what they make of local tokens."""

MODES = ("__torch_dispatch__", "__torch_function__")
"""Functions of modes, which stand between every operator and whoever wants it."""

SHARDING = ("torch.distributed.fsdp",)
"""Gathers and frees parameters in hooks of the model's modules."""

MODELS = ("lightning.pytorch.demos", "pytorch_lightning.demos")
"""Models within those packages."""


def line_of_model(passed: tuple[str, ...] = EVERYTHING) -> FrameType | None:
    """The innermost frame outside the packages and modules `passed`, if it is the model's own.

    Returns:
        The frame; None if a library asked, or torch itself where it is not passed over.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if _within(name, SHARDING):
            return None
        if not _within(name, passed) and frame.f_code.co_name not in MODES:
            asked = _within(name, ("torch", *LIBRARIES)) and not _within(name, MODELS)
            return None if asked else frame
        frame = frame.f_back
    return None


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
