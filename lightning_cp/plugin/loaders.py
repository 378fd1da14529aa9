"""Loaders as the strategy uses them: copies of the user's, alike on peers, which can resume."""

import copy
import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.comm.broadcast import broadcast_object
from lightning_cp.data.collate import WorkerCollate
from lightning_cp.data.packing.dataset import Asked, Rows
from lightning_cp.errors import ConfigError, PeerError, RefusedError


def check_shares(loader: Any, device: int, devices: int) -> None:
    """A dataset that deals out its samples by itself must do so to the virtual devices.

    Those of litdata say in `distributed_env` to how many ranks they do, and which one this is.

    Args:
        loader: of a stage.
        device: number of this virtual device.
        devices: number of virtual devices.

    Raises:
        RefusedError: if samples would be lost, or peers would get different ones.
    """
    dealt = getattr(getattr(loader, "dataset", None), "distributed_env", None)
    shares, share = getattr(dealt, "world_size", None), getattr(dealt, "global_rank", None)
    if isinstance(shares, int) and (shares, share) != (devices, device):
        raise RefusedError(
            f"the dataset {type(loader.dataset).__name__} gives this process share {share} of "
            f"{shares}, but each of the {devices} virtual devices is to read its own, this one "
            f"share {device}: all ranks of a context-parallel group read the same. In "
            f"train_dataloader() and its kin, set dataset.distributed_env.world_size and "
            f"dataset.distributed_env.global_rank to the strategy's data_parallel_size and "
            f"data_parallel_rank"
        )


def own_copy(loader: Any, *, worker_rank: int, seed_worker: Any) -> Any:
    """A loader that may be changed: the user's own object may be that of several stages and runs.

    Workers are seeded as the Trainer would, but alike on the ranks of one virtual device.

    Args:
        loader: a DataLoader; anything else is returned as it is.
        worker_rank: index of the virtual device.
        seed_worker: Lightning's `worker_init_fn`, which takes a `rank`.
    """
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    own._iterator = None  # of the workers of another loader
    if isinstance(own.collate_fn, WorkerCollate):  # that of an earlier run of a CombinedLoader
        own.collate_fn = own.collate_fn.collate
    if own.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
        own.worker_init_fn = partial(seed_worker, rank=worker_rank)
    return own


def makes_rows(loader: Any) -> bool:
    """Whether a loader's dataset makes packed rows.

    Raises:
        ConfigError: if the loader would make batches of them, which they are already.
    """
    if not (isinstance(loader, DataLoader) and isinstance(loader.dataset, Rows)):
        return False
    if loader.batch_size is not None:
        raise ConfigError(
            f"every row of a {type(loader.dataset).__name__} is a batch [1, S] already, but the "
            f"DataLoader has batch_size={loader.batch_size}; use DataLoader(dataset, "
            f"batch_size=None), and more tokens per row for more documents in a step"
        )
    return True


def place_rows(loader: Any, strategy: Any, share: Asked) -> None:
    """Let a loader of one's own make the rows of this rank.

    Args:
        loader: of packed rows; see `makes_rows`.
        strategy: knows the virtual device of this rank.
        share: says how it cuts, None where rows stay whole.
    """
    vars(loader)["dataset"] = loader.dataset.placed(strategy, share)


def watch(loader: Any) -> "Batches | RowOrder | None":
    """Let a loader of one's own remember where its order came from; None where it cannot.

    Other iterable datasets than packed rows, loaders with a state of their own (`state_dict`) and
    other iterables cannot.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return None
    if isinstance(loader.dataset, Rows):
        rows = RowOrder(loader.dataset)
        vars(loader)["sampler"] = rows
        return rows
    if isinstance(loader.dataset, IterableDataset):
        return None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches = Batches(getattr(loader, name))
    vars(loader)[name] = batches  # a DataLoader forbids to set it
    return batches


def watched(loader: Any) -> "Batches | RowOrder | None":
    """What `watch` put into a loader."""
    for name in ("batch_sampler", "sampler"):
        found = getattr(loader, name, None)
        if isinstance(found, Batches | RowOrder):
            return found
    return None


class RowOrder:
    """In place of the sampler of packed rows: tells them epochs, and where to begin.

    Args:
        rows: the loader's dataset.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows, self._epoch, self._skip = rows, 0, 0

    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls this before every epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[None]:
        """Nothing but turns; a loader asks for this, maybe twice, before it starts its workers."""
        self._rows.begin(self._epoch, self._skip)
        return self._turns()

    def _turns(self) -> Iterator[None]:
        self._skip = 0
        yield from itertools.repeat(None)

    def position(self, taken: int, *, cycles: bool) -> dict[str, Any] | None:
        """Where the loader is; None where it may have started anew. See `Batches.position`."""
        return None if cycles and taken else {"rows": taken}

    def resume(self, position: dict[str, Any]) -> None:
        """Begin the next epoch behind the rows that were used."""
        self._skip = position["rows"]


class Batches:
    """The indices of a loader's batches: those of its own batch sampler, in the same order.

    Remembers the random numbers from which the order of the running epoch was drawn, and can begin
    the next one in its middle, without reading what was read before.

    Args:
        inner: the loader's batch sampler, or its sampler where it makes no batches.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._start: dict[str, Any] | None = None
        self._resume: tuple[int, dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        skip, start = resume or (0, None)
        before = random_state()
        if start is not None:
            set_random_state(start, self._generator)
        self._start = random_state(self._generator)
        order = iter(self.inner)
        first = list(itertools.islice(order, skip + 1))[skip:]  # samplers draw their order here
        if start is not None:
            set_random_state(before)
        yield from first
        yield from order

    @property
    def _generator(self) -> Any:
        found = getattr(getattr(self.inner, "sampler", self.inner), "generator", None)
        return found if isinstance(found, torch.Generator) else None

    def position(self, taken: int, *, cycles: bool) -> dict[str, Any]:
        """Where the loader is, in values that a checkpoint may hold.

        Args:
            taken: batches of the epoch that were used; 0 at its end.
            cycles: whether the loader starts anew when others of its epoch are longer.
        """
        own = (taken - 1) % len(self) + 1 if cycles and taken else taken
        skip = min(own, len(self))
        generator = self._generator
        return {
            "skip": skip,
            "start": self._start if skip else None,
            "generator": None if generator is None else generator.get_state(),
        }

    def resume(self, position: dict[str, Any]) -> None:
        """Begin the next epoch at a position, in the order that it had."""
        generator = self._generator
        if generator is not None and position["generator"] is not None:
            generator.set_state(position["generator"].cpu())
        if position["skip"] and position["start"] is not None:
            self._resume = position["skip"], position["start"]


def random_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """States of the default generators on the CPU, and of a sampler's own."""
    own = None if generator is None else generator.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "generator": own}


def set_random_state(state: dict[str, Any], generator: torch.Generator | None = None) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    if generator is not None and state["generator"] is not None:
        generator.set_state(state["generator"].cpu())


class SharedLoader:
    """One loader for a context-parallel group: the first rank reads, and sends what it read.

    Everything but the reading is left to this rank's own loader; on the ranks that do not read, it
    is never iterated.

    Args:
        loader: this rank's loader.
        first: whether this rank reads.
        group: CPU process group; every rank of it makes one, in the same order.
    """

    def __init__(self, loader: Any, *, first: bool, group: Any) -> None:
        self.loader, self._first, self._group = loader, first, group
        try:
            own = len(loader) if first else None
        except (TypeError, NotImplementedError):
            own = None
        self._length: int | None = broadcast_object(own, group=group)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = value

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.loader) if self._first else None)

    def _batches(self, source: Iterator[Any] | None) -> Iterator[Any]:
        """Batches, until the loader that reads ends.

        Raises:
            PeerError: if it fails.
        """
        while True:
            kind, value = broadcast_object(self._next(source), group=self._group)
            if kind == "end":
                return
            if kind == "error":
                raise PeerError(f"the first rank of the group could not read a batch: {value}")
            yield value

    def _next(self, source: Iterator[Any] | None) -> tuple[str, Any]:
        if source is None:
            return "", None
        try:
            return "batch", next(source)
        except StopIteration:
            return "end", None
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            broadcast_object(("error", text), group=self._group)
            raise
