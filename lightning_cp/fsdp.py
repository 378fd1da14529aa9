"""Sharded parameters: every rank of a replica holds an equal part of each (FSDP2, ZeRO 1 to 3).

A parameter is gathered for the time of its block's forward and backward, or of all in between;
gradients are averaged over all ranks of all replicas, which is the one gradient rule, and stay in
parts, and so does what an optimizer keeps.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from lightning_cp.blocks import WrapPolicy, find_blocks
from lightning_cp.compat import (
    can_reduce_unused,
    follow_requires_grad,
    free_gathered,
    reduce_unused,
)
from lightning_cp.errors import ConfigError
from lightning_cp.gradients import average
from lightning_cp.materialize import Made, check_materials, has_meta, materialize
from lightning_cp.mesh import ParameterMesh


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are cut.

    Attributes:
        stage: what is gathered only as long as it is needed. 1: gradients stay whole while they
            are accumulated, and parameters from a forward to its backward. 2: gradients are cut
            after every backward. 3: so are parameters after every forward of a block.
        wrap: see `WrapPolicy`; None takes the repeated blocks: the children of a `ModuleList` or
            `Sequential` that has two or more of their class. An empty collection wraps nothing.
        policy: dtypes of gathered parameters and of reduced gradients.
        offload: keep the parts, and what an optimizer makes of them, in the memory of the CPU.
    """

    stage: int
    wrap: WrapPolicy | None = None
    policy: MixedPrecisionPolicy | None = None
    offload: bool = False

    def options(self) -> dict[str, Any]:
        """Keywords of `fully_shard`."""
        return {
            "reshard_after_forward": False if self.stage in (1, 2) else None,
            "mp_policy": self.policy or MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }


def shard(
    module: nn.Module,
    mesh: ParameterMesh,
    sharding: Sharding,
    *,
    device: torch.device,
    convert: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Shard the parameters of a module over the ranks of a mesh, in place; a collective call.

    Block by block, parameters and buffers come to the device, those on the device "meta" get
    values, all ranks take those of the first, and then each keeps its part: no rank ever holds more
    on its device than its parts and one block. Parameters outside of the wrapped blocks are
    gathered together, for the time of a whole step. Parameters without dimensions stay whole; their
    gradients are those of this rank until `average_loose`.

    Args:
        module: the root module, the same on every rank but for values.
        mesh: the ranks; with tensor parallelism what is cut for it is cut already.
        sharding: how.
        device: of this rank.
        convert: gives a block that was on "meta" the dtype that it is trained in, where that is
            another one.

    Raises:
        ConfigError: on every rank alike, if a wrapped block shares a parameter with a module
            outside of it, or a module on "meta" cannot get values.
    """
    blocks = find_blocks(module, sharding.wrap)
    check_materials(module)
    loose = {x for x in module.parameters() if x.ndim == 0}
    made: Made = {}
    done: dict[int, Tensor] = {}  # by identity, which is theirs as long as they are here
    for part in (*blocks, module):
        if has_meta(part):
            materialize(part, device, made)
            if convert is not None:
                convert(part)
        new = [x for x in (*part.parameters(), *part.buffers()) if id(x) not in done]
        _move(new, device)
        _share_first(new, mesh)
        ignored = loose & set(part.parameters())
        fully_shard(part, mesh=mesh.parameters, ignored_params=ignored, **sharding.options())
        _keep_origin(part)
        done |= {id(x): x for x in (*part.parameters(), *part.buffers())}


def complete_root(module: nn.Module, mesh: ParameterMesh, sharding: Sharding) -> None:
    """Shard what the user left of a module of which parts are sharded already, the root itself."""
    if not isinstance(module, FSDPModule):
        loose = {x for x in module.parameters() if x.ndim == 0}
        fully_shard(module, mesh=mesh.parameters, ignored_params=loose, **sharding.options())
        _keep_origin(module)


def complete(module: nn.Module, steps: Iterable[str]) -> None:
    """Make the root of a sharded module ready for training.

    Its methods `steps` gather its parameters, as its forward does, and parameters that only some
    ranks use in a step get the gradients of those.
    """
    reduce_unused(module)
    for name in steps:
        if name not in vars(module):
            register_fsdp_forward_method(module, name)
    _zero_parts(module)


def check_version() -> None:
    """What torch must be able to do.

    Raises:
        ConfigError: on every rank alike, if it cannot.
    """
    if not can_reduce_unused():
        raise ConfigError(
            f"sharded parameters: torch {torch.__version__} mixes up the gradients of those that "
            f"only some ranks use in a step; use zero_stage=0, or a torch that has "
            f"FSDPModule.set_reduce_scatter_unused_params (2.13 does)"
        )


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """The modules within a module, itself included, that gather parameters."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of a module are sharded, by `shard` or by the user."""
    return bool(sharded_parts(module))


def check_sharded(module: nn.Module, ranks: Collection[int]) -> None:
    """What must hold for a module that came sharded: the mean of its gradients is over all ranks.

    Args:
        module: the root module.
        ranks: global ranks over which gradients are averaged.

    Raises:
        ConfigError: on every rank alike, if a parameter that is trained is not sharded over them.
    """
    reshard(module)
    for name, x in module.named_parameters():
        own = x.device_mesh.mesh.flatten().tolist() if isinstance(x, DTensor) else []
        if x.requires_grad and x.ndim and not set(ranks) <= set(own):
            raise ConfigError(
                f"parameter {name!r} is sharded over {max(len(own), 1)} ranks, but gradients are "
                f"averaged over {len(ranks)}, {sorted(ranks)}; shard it with "
                f"self.device_mesh['data_parallel'] (with replicas of "
                f"self.device_mesh['data_parallel_replicate', 'data_parallel']), or leave sharding "
                f"to the strategy"
            )


def average_loose(module: nn.Module, *, group: Any) -> None:
    """Average the gradients of what a sharded module keeps whole; a collective call."""
    if is_sharded(module):
        average(loose(module), group=group)


def loose(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that are trained and have no dimension to be cut along."""
    return [x for x in module.parameters() if x.ndim == 0 and x.requires_grad]


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, also in the middle of a step; no rank needs another for that."""
    for part in sharded_parts(module):
        free_gathered(part)


@contextmanager
def without_sync(module: nn.Module, *, whole: bool) -> Iterator[None]:
    """Backwards inside accumulate gradients; the first one after finishes their sums.

    Args:
        module: the root module.
        whole: gradients stay whole on their rank, which takes memory and no messages; False: every
            backward leaves each rank its part of the sum over its replica, as at rest.
    """
    roots = [module] if isinstance(module, FSDPModule) else []
    for root in roots:
        (root.set_requires_gradient_sync if whole else root.set_requires_all_reduce)(False)
    try:
        yield
    finally:
        for root in roots:
            (root.set_requires_gradient_sync if whole else root.set_requires_all_reduce)(True)


def gather_by_hand(module: nn.Module) -> None:
    """Let a step run several forwards and backwards, of parameters that it freezes in between.

    The first backward frees the parameters outside of blocks: the modules that have them gather
    them again when they are called. Those that are gathered while an optimizer is toggled follow
    it.
    """

    def gather(part: nn.Module, args: Any) -> None:
        if isinstance(module, FSDPModule):
            module.unshard()

    for part in _outside(module):
        if part is not module and any(True for _ in part.parameters(recurse=False)):
            part.register_forward_pre_hook(gather)
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        if hasattr(module, name):
            vars(module)[name] = _followed(getattr(module, name), module)


def broadcast(tensors: Iterable[Tensor], *, group: Any) -> None:
    """Give every rank of a group the tensors of its first, in place; of sharded ones the parts."""
    if dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for whole_or_part in tensors:
            tensor = whole_or_part.detach()
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sent = tensor.contiguous()
            dist.broadcast(sent, source, group=group)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def settle(module: nn.Module, *, failed: bool) -> None:
    """Bring a module to rest after a step, whether or not it came to its end.

    Args:
        module: the root module, sharded or not.
        failed: whether the step raised; what is left of its gradients is given up then.
    """
    if failed and isinstance(module, FSDPModule):
        module.reset_iter_state()
    reshard(module)


def full(value: Tensor) -> Tensor:
    """A sharded tensor put together, a collective call; any other as it is."""
    if not isinstance(value, DTensor):
        return value
    found: Tensor = value.full_tensor()
    return found


def whole(tree: Any, *, keep: bool) -> Any:
    """Nested containers with every sharded tensor put together; a collective call.

    Args:
        tree: the same on every rank, but for the parts.
        keep: whether this rank wants the result.

    Returns:
        The same containers with plain tensors on the CPU where they were sharded; on ranks that do
        not keep them None in their place.
    """

    def put_together(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        found = full(value.detach())
        return found.cpu() if keep else None

    return tree_map(put_together, tree)


def part_of(value: Any, like: Tensor) -> Any:
    """This rank's part of a whole tensor, cut as another tensor is cut.

    Args:
        value: a tensor, equal on all ranks; anything else is returned as it is.
        like: a tensor of the same shape; one that is not sharded, or of another shape, has no say.
    """
    cut = isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape
    if not cut or not isinstance(like, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    moved = value.detach().to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def _move(tensors: list[Tensor], device: torch.device) -> None:
    """Bring tensors to a device, in place."""
    for x in tensors:
        if x.device != device:
            x.data = x.data.to(device)


def _share_first(tensors: list[Tensor], mesh: ParameterMesh) -> None:
    """Give all ranks of a mesh the values of its first; what is cut for the layers stays cut."""
    whole = [x for x in tensors if not isinstance(x, DTensor)]
    broadcast(whole, group=mesh["tensor_parallel"].get_group())
    for name in ("data_parallel_replicate", "data_parallel"):
        broadcast(tensors, group=mesh[name].get_group())


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """A root and the modules within it that belong to no block."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _outside(child)


def _followed(method: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                follow_requires_grad(part)
        return found

    return call


def _keep_origin(part: nn.Module) -> None:
    """The class that torch makes for a sharded module says where the user's class is from."""
    made: Any = type(part)
    made.__module__ = made.__mro__[2].__module__


def _zero_parts(module: nn.Module) -> None:
    """`zero_grad` of the root zeroes the parts, also while the parameters are gathered."""
    parts = list(module.parameters())

    def zero_grad(set_to_none: bool = True) -> None:
        for x in parts:
            if set_to_none:
                x.grad = None
            elif x.grad is not None:
                x.grad.detach_().zero_()

    vars(module)["zero_grad"] = zero_grad
