"""Streams of litdata: chunks of real text in a folder, and runs on them.

`python -m tests._harness.streamed FOLDER` writes the chunks.
"""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests._harness.models import Case, LanguageModel, Outcome, Text, outcome, seeded, trainer_of
from tests._harness.trainer import workers_allowed

CASE = Case(samples=16, lengths=(9,), epochs=2, precision="64-true", momentum=0.9)
PER_CHUNK = 2


def sample(index: int) -> dict[str, Any]:
    """One sample, by its number."""
    found: dict[str, Any] = Text(CASE, CASE.samples)[index]
    return found


def write(folder: Path) -> None:
    """Let litdata write all samples in chunks."""
    from litdata import optimize

    numbers = list(range(CASE.samples))
    optimize(sample, numbers, str(folder), chunk_size=PER_CHUNK, num_workers=1)


class Streaming(LanguageModel):
    """Makes its loader as a user of litdata does; of the strategy's share where it has one.

    Args:
        folder: of the chunks.
        workers: of the loader.
        told: whether the dataset is told of virtual devices.
    """

    def __init__(self, folder: Path, workers: int, told: bool) -> None:
        super().__init__(CASE)
        self._folder, self._workers, self._told = folder, workers, told

    def train_dataloader(self) -> Any:
        """A loader with its state."""
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(self._folder), shuffle=True, drop_last=True)
        strategy = self.trainer.strategy
        if self._told:
            dataset.distributed_env.world_size = strategy.data_parallel_size
            dataset.distributed_env.global_rank = strategy.data_parallel_rank
        context = "fork" if self._workers else None
        return StreamingDataLoader(
            dataset,
            batch_size=CASE.batch,
            num_workers=self._workers,
            multiprocessing_context=context,
        )


def stream(
    rank: int,
    world: int,
    options: dict[str, Any] | None,
    chunks: Path,
    *more: Any,
) -> Outcome:
    """Train on a stream; a task of the pool.

    Args:
        rank: rank of this process.
        world: number of ranks.
        options: of the strategy; None: the plain Trainer.
        chunks: what `write` wrote.
        more: workers; a folder for checkpoints of all steps; a checkpoint, or None; whether the
            dataset is told of virtual devices, as it is where there are any.
    """
    workers, folder, resume, told = (*more, options is not None)[:4]
    model = Streaming(chunks, workers, told)
    model.load_state_dict(seeded(CASE).state_dict())
    model.double()
    keep = -1 if resume is None else 0
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=keep)
    trainer = trainer_of(
        rank, world, CASE, options, enable_checkpointing=True, callbacks=[callback]
    )
    with workers_allowed():
        trainer.fit(model, ckpt_path=resume)
    return outcome(trainer, model)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
