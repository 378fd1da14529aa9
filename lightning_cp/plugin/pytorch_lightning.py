"""`ContextParallelStrategy` and `ContextParallelMonitor` for `pytorch_lightning`."""

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies.parallel import ParallelStrategy

from lightning_cp.plugin.base import ContextParallelBase
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.monitor import MonitorBase


class ContextParallelStrategy(ContextParallelBase, ParallelStrategy):  # type: ignore[misc]
    """For the Trainer of `pytorch_lightning`; the options are those of `ContextParallelBase`."""

    _flavor = Flavor("pytorch_lightning", "lightning_fabric")


class ContextParallelMonitor(MonitorBase, Callback):
    """For the Trainer of `pytorch_lightning`; what it logs is said at `MonitorBase`."""


ContextParallelMonitor.__doc__ = MonitorBase.__doc__
ContextParallelStrategy.__doc__ = ContextParallelBase.__doc__
