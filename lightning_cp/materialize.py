"""Parameters that were made on the device "meta", without values, get memory and values."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.errors import ConfigError

Made = dict[int, tuple[Tensor, Tensor]]
"""By identity a tensor on "meta", and the one in its place."""


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of a module has no values yet."""
    return any(x.is_meta for x in (*module.parameters(), *module.buffers()))


def check_materials(module: nn.Module) -> None:
    """See that every module with tensors on "meta" can give them values.

    Raises:
        ConfigError: on every rank alike, if one has no method `reset_parameters`, or has a
            parameter that is cut already.
    """
    for name, part in module.named_modules():
        own = list(_own_meta(part))
        cut = [key for key, x in own if isinstance(x, DTensor)]
        if cut:
            raise ConfigError(
                f"parameter {name + '.' + cut[0]!r} is on the device 'meta' and cut for tensor "
                f"parallelism already, so that ranks would draw its values apart; pass the plan "
                f"as tensor_parallel_plan, which is followed once parameters have values"
            )
        if own and not callable(getattr(part, "reset_parameters", None)):
            raise ConfigError(
                f"{own[0][0]!r} of module {name!r} ({type(part).__name__}) is on the device 'meta' "
                f"and the class has no method reset_parameters that would give it values; write "
                f"one, or make the module on another device"
            )


def materialize(
    module: nn.Module, device: torch.device, made: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Give tensors on "meta" memory, and values by the `reset_parameters` of their modules.

    Modules are taken in the order of `module.modules()`, which is that in which they are made, so
    that the random numbers are those of a module that is made on a device.

    Args:
        module: whose tensors those are; the others are left alone.
        device: where they come to be.
        made: for tensors that modules share; filled.
    """
    for part in module.modules():
        own = list(_own_meta(part))
        for name, x in own:
            if id(x) not in made:
                real = torch.empty_like(x, device=device)
                trained = isinstance(x, nn.Parameter)
                made[id(x)] = x, nn.Parameter(real, x.requires_grad) if trained else real
            setattr(part, name, made[id(x)][1])
        if own:
            part.reset_parameters()  # type: ignore[operator]  # `check_materials` has looked


def _own_meta(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    own = (*part.named_parameters(recurse=False, remove_duplicate=False),)
    for name, x in (*own, *part.named_buffers(recurse=False, remove_duplicate=False)):
        if x.is_meta:
            yield name, x
