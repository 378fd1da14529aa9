"""Who is calling: the module on the Python stack, for messages."""

import sys
from pathlib import Path
from types import FrameType

import torch

from lightning_cp.context import Context


def caller(context: Context | None) -> str:
    """The innermost module of the model on the call stack: name, class and source line.

    Looked up only when something is refused, so that a step pays nothing for it.
    """
    root = context.module() if context is not None and context.module is not None else None
    names = {id(module): name for name, module in root.named_modules()} if root else {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, torch.nn.Module) and (not names or id(module) in names):
            name = names.get(id(module), "")
            title = f"module '{name}'" if name else "the root module"
            line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            return f"{title} ({type(module).__name__}, {line})"
        frame = frame.f_back
    return "a compiled region" if names else "code outside any module"


def suspects(context: Context) -> str:
    """The modules that look as if they should have called attention, or the whole model."""
    root = context.module() if context.module is not None else None
    if root is None:
        return "the model"
    found = [
        f"module '{name}' ({type(part).__name__})"
        for name, part in root.named_modules()
        if name and "att" in type(part).__name__.lower()
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more or f"the root module ({type(root).__name__})"
