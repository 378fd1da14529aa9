"""Figures of every step for the Trainer's loggers: speed, balance, traffic and planning."""

import warnings
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from lightning_cp.config import CHOICES, Config
from lightning_cp.context import Context, Ran
from lightning_cp.errors import ConfigError, ContextParallelWarning
from lightning_cp.plan import Sizes, group_load
from lightning_cp.plugin.mixin import ContextParallelMixin
from lightning_cp.spans import total


class _Window:
    """What is counted from one row to the next."""

    def __init__(self) -> None:
        self.start = perf_counter()
        self._tokens = self._built = 0
        self._planning = 0.0
        self._layouts: Counter[str] = Counter()
        self._exchanges: Counter[str] = Counter()

    def add(self, context: Context) -> None:
        """Count a micro-batch that ran."""
        for sequence in context.sequences.values():
            keys = sequence.keys
            self._tokens += total(keys) if keys else sequence.length * sequence.batch
        self._built += context.log.built
        self._planning += context.log.planning
        self._layouts[context.layout] += 1
        self._exchanges[str(context.exchange)] += 1

    def figures(self, devices: int) -> dict[str, float]:
        """Figures of so many virtual devices."""
        return {
            "tokens_per_second": self._tokens * devices / (perf_counter() - self.start),
            "plans_built": self._built,
            "plan_seconds": self._planning,
        }

    def chosen(self, config: Config) -> dict[str, float]:
        """Parts of the micro-batches that got each layout and each exchange, where "auto" chose."""
        found = {}
        for option, counts in (("layout", self._layouts), ("exchange", self._exchanges)):
            for name in CHOICES[option] if getattr(config, option) == "auto" else ():
                if name != "auto":
                    found[f"{option}_{name}"] = counts[name] / max(counts.total(), 1)
        return found


class _Load:
    """What the ranks of a group do in a step; the micro-batches are kept, and counted if asked."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []

    def figures(self) -> dict[str, float]:
        """Figures of all micro-batches together."""
        tokens = [
            [sequence.layout.size(rank) * sequence.batch for rank in range(context.world)]
            for context in self.contexts
            for sequence in context.sequences.values()
        ]
        return {
            "tokens_max_over_mean": _unevenness(tokens),
            "work_max_over_mean": _unevenness([_work(context) for context in self.contexts]),
            "kv_bytes": sum(map(_kv_bytes, self.contexts)),
        }


def _work(context: Context) -> list[int]:
    """Pairs of all heads that every rank computes in the forwards of a micro-batch."""
    work = [0] * context.world
    for call, times in context.log.ran.items():
        if not call.backward:
            pairs = group_load(context.log.plans[call.handle]).work(_sizes(call))
            work = [a + times * b for a, b in zip(work, pairs, strict=True)]
    return work


def _kv_bytes(context: Context) -> int:
    """Bytes that all ranks of the group receive in the attention of a micro-batch."""
    found = 0
    for call, times in context.log.ran.items():
        load = group_load(context.log.plans[call.handle])
        found += times * load.bytes(_sizes(call), backward=call.backward, kept=call.kept)
    return found


def _sizes(call: Ran) -> Sizes:
    heads, dims = (call.heads, call.kv_heads), (call.head_dim, call.value_dim)
    return Sizes(call.batch, *heads, *dims, call.itemsize, max(call.itemsize, 4))


def _unevenness(loads: Sequence[Sequence[int]]) -> float:
    """The busiest ranks over the mean ones, of loads by micro-batch and rank; 1 without a load."""
    means = sum(sum(load) / len(load) for load in loads)
    return sum(map(max, loads)) / means if means else 1.0


class MonitorBase:
    """Logs what context parallelism does in a step, every `log_every_n_steps` of the Trainer.

    The first rank logs to all loggers, under the step of `self.log`. Nothing is sent for it: what
    other ranks do follows from the layouts and plans, which are the same on every rank. In
    training, with `N` the steps since the row before:

    - `cp/tokens_per_second`: tokens of the global batch over wall time, in `N` steps, validation
      left out. Neither dummies nor padding that the batch's attention mask hides count. With
      several virtual devices, as many tokens as on the first are taken for each. An accelerator is
      not waited for, so few steps between two rows make it too high.
    - `cp/tokens_max_over_mean`: in this step, tokens of the busiest rank of the first group over
      the mean of its ranks. Dummies and padding count: a rank computes them.
    - `cp/work_max_over_mean`: the same of attention work: (query, key) pairs of all heads and
      calls.
    - `cp/kv_bytes`: bytes that the ranks of the first group receive in the attention of this step:
      keys and values in every forward and backward, and their gradients.
    - `cp/plans_built`: attention plans that the first rank made in its main process, in `N` steps.
    - `cp/plan_seconds`: what these, and layouts that were made there, took.
    - `cp/layout_balanced` and the like, `cp/exchange_direct` and the like: where the option is
      "auto", the part of the micro-batches in `N` steps for which each was chosen.

    A step of several micro-batches adds up the busiest ranks and the means of each.

    Args:
        validation: log the same, in one row, for every validation: `cp/val_tokens_per_second`, ...

    Raises:
        ConfigError: on every rank, when the Trainer sets up, if its strategy is not
            `ContextParallelStrategy`, or there is no logger.

    Warns:
        ContextParallelWarning: on the first rank, if a group is one rank and nothing is logged.
    """

    def __init__(self, validation: bool = False) -> None:
        super().__init__()
        self._validation = validation
        self._window, self._step = _Window(), _Load()
        self._validated, self._valid = _Window(), _Load()
        self._last: Context | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See that there is something to log, and where to."""
        strategy = trainer.strategy
        if not isinstance(strategy, ContextParallelMixin):
            raise ConfigError(
                f"ContextParallelMonitor logs what ContextParallelStrategy does, and this Trainer "
                f"has {type(strategy).__name__}; use strategy='context_parallel', or leave the "
                f"callback out"
            )
        if not trainer.loggers:
            raise ConfigError(
                "ContextParallelMonitor logs to the Trainer's loggers, and it has 0; use a logger, "
                "for example logger=True, or leave the callback out"
            )
        if strategy.topology.cp == 1 and trainer.is_global_zero:
            warnings.warn(
                f"ContextParallelMonitor logs nothing: context_parallel_size is 1 on "
                f"{strategy.topology.dp} devices; it needs groups of 2 or more ranks",
                ContextParallelWarning,
                stacklevel=2,
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The clock starts."""
        self._window, self._step, self._last = _Window(), _Load(), None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Add a micro-batch, and log where a step ends that is to be logged."""
        self._add(trainer, self._window, self._step)
        if trainer.fit_loop._should_accumulate():
            return
        if trainer._logger_connector.should_update_logs:
            self._log(trainer, self._window, self._step, prefix="cp/")
            self._window = _Window()
        self._step = _Load()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Another clock runs."""
        self._validated, self._valid = _Window(), _Load()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Add a batch."""
        self._add(trainer, self._validated, self._valid)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the validation where that was asked for; training goes on."""
        if self._validation and not trainer.sanity_checking:
            self._log(trainer, self._validated, self._valid, prefix="cp/val_")
        self._window.start += perf_counter() - self._validated.start

    def _add(self, trainer: Any, window: "_Window", load: "_Load") -> None:
        context = trainer.strategy._context
        if not trainer.is_global_zero or context is None or context is self._last:
            return
        self._last = context
        window.add(context)
        load.contexts.append(context)

    def _log(self, trainer: Any, window: "_Window", load: "_Load", *, prefix: str) -> None:
        if not trainer.is_global_zero or not load.contexts:
            return
        strategy = trainer.strategy
        figures = window.figures(strategy.topology.dp) | load.figures()
        figures |= window.chosen(strategy._config)
        metrics = {prefix + name: value for name, value in figures.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
