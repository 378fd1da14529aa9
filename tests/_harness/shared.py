"""A module whose layers ranks can share, and the ways to say so."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests._harness.models import Case, LanguageModel

WHOLE = Replicate()
STYLES: dict[str, Callable[..., ParallelStyle]] = {
    "attention.q": ColwiseParallel,
    "attention.k": ColwiseParallel,
    "attention.v": ColwiseParallel,
    "attention.out": RowwiseParallel,
    "mlp.1": ColwiseParallel,
    "mlp.3": RowwiseParallel,
}


class SplitAttention(nn.Module):
    """Attention that takes the number of heads from what its layers give."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(4 * heads, 4 * heads)
        self.k = nn.Linear(4 * heads, 4 * kv_heads)
        self.v = nn.Linear(4 * heads, 4 * kv_heads)
        self.out = nn.Linear(4 * heads, 4 * heads)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, S, C]` to `[B, S, C]`."""
        q, k, v = (y(x).unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q, self.k, self.v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, enable_gqa=grouped)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected


class Shareable(LanguageModel):
    """The language model with layers that can be cut."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        for block in self.net.blocks:
            block.attention = SplitAttention(case.heads, case.kv_heads)

    def shared(self) -> bool:
        """Whether that has been done."""
        return any(isinstance(x, DTensor) for x in self.parameters())


class SharedByUser(Shareable):
    """Cuts its layers itself, as for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        """Share the layers of every block."""
        mesh: Any = self.device_mesh
        if mesh is None or self.shared():
            return
        tensor, data = mesh["tensor_parallel"], mesh["data_parallel"]
        if tensor.size() > 1:
            share(self, tensor)
        if data.size() > 1:
            self.shard(data)

    def shard(self, mesh: DeviceMesh) -> None:
        """Leave that to the strategy."""


class ShardedByUser(SharedByUser):
    """Shards the model, though not the LightningModule around it, as its documentation shows."""

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard blocks and model."""
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Distributed(SharedByUser):
    """Its attention sees tensors that stand for all heads."""

    def configure_model(self) -> None:
        """Share the layers, and let q, k and v stay what they are between them."""
        mesh: Any = self.device_mesh
        if mesh is None or self.shared():
            return
        for block in self.net.blocks:
            plan = {name: style() for name, style in STYLES.items()}
            for name in ("attention.q", "attention.k", "attention.v"):
                plan[name] = ColwiseParallel(use_local_output=False)
            parallelize_module(block, mesh["tensor_parallel"], plan)


class SequenceInParts(SharedByUser):
    """Between its layers each rank has a part of the tokens that it shares with the others."""

    def configure_model(self) -> None:
        """Norms and sums see parts; attention and the layers of the MLP gather them."""
        mesh: Any = self.device_mesh
        if mesh is None or self.shared():
            return
        own, none = Shard(1), (None,)
        for block in self.net.blocks:
            styles = {name: style() for name, style in STYLES.items()}
            styles["norm"] = styles["mlp.0"] = SequenceParallel()
            styles["attention"] = PrepareModuleInput(
                input_layouts=(own, *none), desired_input_layouts=(WHOLE, *none)
            )
            styles["attention.out"] = RowwiseParallel(output_layouts=own)
            styles["mlp.1"] = ColwiseParallel(input_layouts=own)
            styles["mlp.3"] = RowwiseParallel(output_layouts=own)
            parallelize_module(block, mesh["tensor_parallel"], styles)
        first = PrepareModuleInput(
            input_layouts=(WHOLE, *none),
            desired_input_layouts=(own, *none),
            use_local_output=True,
        )
        parallelize_module(self.net.blocks[0], mesh["tensor_parallel"], first)
        head = ColwiseParallel(input_layouts=own, output_layouts=WHOLE)
        parallelize_module(self.net.head, mesh["tensor_parallel"], head)


class LossInParts(SharedByUser):
    """Scores stay cut over the vocabulary."""

    def configure_model(self) -> None:
        """Share the layers, and leave the scores where they are."""
        mesh: Any = self.device_mesh
        if mesh is not None and not self.shared():
            share(self, mesh["tensor_parallel"], scores=Shard(-1))

    def fields(self, batch: Any) -> tuple[Any, ...]:
        """Labels stand beside the scores as tensors that every rank has."""
        tokens, labels, *rest = super().fields(batch)
        mesh: Any = self.device_mesh
        if self.shared():
            labels = DTensor.from_local(labels, mesh["tensor_parallel"], [WHOLE])
        return tokens, labels, *rest

    def loss(self, batch: Any) -> Tensor:
        """The loss over scores in parts."""
        with self.parts():
            return super().loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Its backward."""
        with self.parts():
            super().backward(loss, *args, **kwargs)

    def parts(self) -> AbstractContextManager[None]:
        """What torch has for such losses."""
        return loss_parallel() if self.shared() else nullcontext()


def share(module: LanguageModel, mesh: DeviceMesh, scores: Placement = WHOLE) -> None:
    """Cut the layers of every block, and the head, whose scores are placed as asked for."""
    for block in module.net.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in STYLES.items()})
    local = scores == WHOLE
    head = ColwiseParallel(output_layouts=scores, use_local_output=local)
    parallelize_module(module.net.head, mesh, head)


def plan() -> dict[str, Any]:
    """The same by the names of modules."""
    styles = {f"net.blocks.*.{name}": style() for name, style in STYLES.items()}
    return {**styles, "net.head": ColwiseParallel(output_layouts=WHOLE)}
