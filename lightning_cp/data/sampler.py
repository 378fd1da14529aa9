"""The sampler of virtual devices, for loaders that the Trainer is to leave alone."""

from typing import Any, Protocol

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler


class VirtualDevice(Protocol):
    """Which of how many virtual devices this rank belongs to; a strategy says so."""

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def data_parallel_rank(self) -> int: ...


class ContextParallelSampler(DistributedSampler[Any]):
    """Gives every rank of a context-parallel group the same samples, and groups different ones.

    The indices are those of torch's `DistributedSampler` over virtual devices. The Trainer makes
    such a sampler itself unless `use_distributed_sampler=False`; this one is for loaders and batch
    samplers of your own. Make it in `train_dataloader()` or later, when the sizes are known.

    Args:
        dataset: a dataset with a length.
        strategy: the Trainer's `ContextParallelStrategy`, or anything with `data_parallel_size` and
            `data_parallel_rank`.
        shuffle: another order in every epoch, for which `set_epoch` is called by the Trainer.
        seed: of the order; the same on every rank.
        drop_last: leave out samples that do not fill all devices, in place of repeating some.

    Raises:
        RuntimeError: if the strategy does not know its sizes yet.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        strategy: VirtualDevice,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=strategy.data_parallel_size,
            rank=strategy.data_parallel_rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
