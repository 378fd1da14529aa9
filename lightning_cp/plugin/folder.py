"""Checkpoints as folders: every rank writes its parts, and any number of ranks reads them."""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_cp.comm.failure import named
from lightning_cp.compat import unflattened
from lightning_cp.errors import CheckpointError
from lightning_cp.plugin.pending import why

REST = "meta.pt"
"""What is no parameter and no state of an optimizer, in one file; Lightning's name for it."""

MODEL, OPTIMIZER = "model", "optimizer_"
"""Keys under which Lightning's `consolidate_checkpoint` looks."""

MODELS = (MODEL, "state_dict")
"""Keys of the module; the second is that of Lightning's `ModelParallelStrategy`."""


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint of this kind."""
    return (path / ".metadata").is_file()


def divided(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every rank writes its parts of, and the rest.

    The state of an optimizer that keeps none is with the rest: a folder of parts would lose it.

    Args:
        checkpoint: what Lightning collected, with sharded tensors, and states of optimizers as
            `by_name` gives them.
    """
    rest = dict(checkpoint)
    parts = {MODEL: rest.pop("state_dict")}
    for index, state in enumerate(rest.pop("optimizer_states", ())):
        (parts if state["state"] else rest)[f"{OPTIMIZER}{index}"] = state
    return parts, rest


def write_rest(rest: Mapping[str, Any], path: Path) -> None:
    """Make a folder, and write what is not sharded; one process calls, before `write`."""
    path.mkdir()
    with (path / REST).open("wb") as file:
        torch.save(dict(rest), file)


def write(parts: dict[str, Any], path: Path, name: Path) -> None:
    """Write the parts into a folder; a collective call of all ranks.

    Args:
        parts: see `divided`.
        path: the folder, the same on every rank.
        name: of the checkpoint, for messages.

    Raises:
        CheckpointError: on every rank alike, if one could not write.
        PeerError: if a rank is gone.
    """
    try:
        with named(f"writing {name}"):
            state_dict_saver.save(parts, checkpoint_id=path)
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint {name} was not written: {why(error)}") from error


def write_later(parts: dict[str, Any], path: Path, *, group: Any) -> Future[Any]:
    """Copy the parts to the CPU, and let a thread write them; a collective call of all ranks.

    Args:
        parts: see `divided`; they may change as soon as this returns.
        path: the folder, the same on every rank.
        group: all ranks on the CPU; nothing else uses it.

    Returns:
        Done when all ranks have written.
    """
    future: Any = state_dict_saver.async_save(parts, checkpoint_id=path, process_group=group)
    written: Future[Any] = future
    return written


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
        What Lightning saved, with sharded tensors where the module's are, and states of optimizers
        with names in place of numbers.

    Raises:
        CheckpointError: on every rank alike, if one could not read.
        PeerError: if a rank is gone.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    places = {
        key: place
        for key, place in metadata.planner_data.items()
        if place[0] in MODELS or optimizers
    }
    model, parameters = module.state_dict(), dict(module.named_parameters())
    found: dict[str, Any] = {}
    for key, place in places.items():
        kind = metadata.state_dict_metadata[key]
        like = model.get(place[1]) if place[0] in MODELS else None
        if place[0] not in MODELS and place[1] == "state":
            like = parameters.get(place[2])
        found[key] = _room(kind, like) if isinstance(kind, TensorStorageMetadata) else None
    _read(found, reader, path)
    nested = unflattened(found, places)
    checkpoint: dict[str, Any] = torch.load(
        path / REST, map_location="cpu", weights_only=weights_only
    )
    checkpoint["state_dict"] = next((nested.pop(key) for key in MODELS if key in nested), {})
    for name in [name for name in checkpoint if name.startswith(OPTIMIZER)]:
        nested[name] = checkpoint.pop(name)
    states = [nested.get(f"{OPTIMIZER}{index}") for index in range(len(nested))]
    found_states = [{"state": {}, **state} for state in states if state is not None]
    if found_states and optimizers:
        checkpoint["optimizer_states"] = found_states
    return checkpoint


def _read(found: dict[str, Any], reader: FileSystemReader, path: Path) -> None:
    try:
        with warnings.catch_warnings(), named(f"reading {path}"):
            # One process may read, too.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_loader.load(found, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"the checkpoint {path} could not be read: {why(error)}") from error


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
