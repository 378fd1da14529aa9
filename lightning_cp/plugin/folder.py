"""Checkpoints as folders: every rank writes its parts, and any number of ranks reads them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_cp.compat import unflattened

REST = "meta.pt"
"""What is no parameter and no state of an optimizer, in one file; Lightning's name for it."""

MODEL, OPTIMIZER = "model", "optimizer_"
"""Keys under which Lightning's `consolidate_checkpoint` looks."""


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint of this kind."""
    return (path / ".metadata").is_file()


def save(checkpoint: Mapping[str, Any], path: Path, *, first: bool) -> None:
    """Write a checkpoint; a collective call of all ranks.

    Args:
        checkpoint: what Lightning collected, with sharded tensors, and states of optimizers as
            `by_name` gives them.
        path: the folder, the same on every rank; made where it does not exist.
        first: whether this rank writes what is not sharded.
    """
    rest = dict(checkpoint)
    parts = {MODEL: rest.pop("state_dict")}
    for index, state in enumerate(rest.pop("optimizer_states", ())):
        parts[f"{OPTIMIZER}{index}"] = state
    path.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(parts, checkpoint_id=path)
    if first:
        torch.save(rest, path / REST)


def load(
    path: Path, module: nn.Module, *, optimizers: bool, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint, cut for the ranks that read it; a collective call of all ranks.

    Args:
        path: the folder.
        module: its parameters say how to cut.
        optimizers: whether to read the states of optimizers.
        weights_only: as of `torch.load`, for what is no tensor.

    Returns:
        What Lightning saved, with sharded tensors.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    places = {
        key: place
        for key, place in metadata.planner_data.items()
        if place[0] == MODEL or optimizers
    }
    model, parameters = module.state_dict(), dict(module.named_parameters())
    found: dict[str, Any] = {}
    for key, place in places.items():
        kind = metadata.state_dict_metadata[key]
        like = model.get(place[1]) if place[0] == MODEL else None
        if place[0] != MODEL and place[1] == "state":
            like = parameters.get(place[2])
        found[key] = _room(kind, like) if isinstance(kind, TensorStorageMetadata) else None
    state_dict_loader.load(found, storage_reader=reader)
    nested = unflattened(found, places)
    checkpoint: dict[str, Any] = torch.load(
        path / REST, map_location="cpu", weights_only=weights_only
    )
    checkpoint["state_dict"] = nested.get(MODEL, {})
    count = sum(name.startswith(OPTIMIZER) for name in nested)
    if count:
        states = [nested[f"{OPTIMIZER}{index}"] for index in range(count)]
        checkpoint["optimizer_states"] = [{"state": {}, **state} for state in states]
    return checkpoint


def by_name(
    state: Mapping[str, Any], parameters: Sequence[Tensor], module: nn.Module
) -> dict[str, Any]:
    """State of an optimizer with names in place of numbers, which a folder cannot keep.

    Args:
        state: what `state_dict` returned.
        parameters: those of the optimizer, in its order.
        module: the module that they belong to.
    """
    names = {id(x): name for name, x in module.named_parameters()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    table = dict(zip(numbers, (names[id(x)] for x in parameters), strict=True))
    return {
        "state": {table[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [table[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _room(kind: TensorStorageMetadata, like: Any) -> Tensor:
    """An empty tensor to read into, cut like a tensor of the same shape."""
    dtype = kind.properties.dtype
    if isinstance(like, DTensor) and like.shape == kind.size:
        return torch.zeros_like(like.detach(), dtype=dtype)
    return torch.zeros(kind.size, dtype=dtype)
