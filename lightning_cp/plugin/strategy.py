"""`ContextParallelStrategy` and `ContextParallelMonitor` for `lightning.pytorch`."""

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_cp.plugin.aside import WritesAside
from lightning_cp.plugin.base import ContextParallelBase
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.monitor import MonitorBase


class AsideCheckpointIO(WritesAside, TorchCheckpointIO):
    """Files of the Trainer of `lightning.pytorch` are written aside, synced and renamed."""


class ContextParallelStrategy(ContextParallelBase, ParallelStrategy):
    """For the Trainer of `lightning.pytorch`; the options are those of `ContextParallelBase`."""

    _checkpoint_class = AsideCheckpointIO
    _flavor = Flavor("lightning.pytorch", "lightning.fabric")


class ContextParallelMonitor(MonitorBase, Callback):
    """For the Trainer of `lightning.pytorch`; what it logs is said at `MonitorBase`."""


ContextParallelMonitor.__doc__ = MonitorBase.__doc__
ContextParallelStrategy.__doc__ = ContextParallelBase.__doc__
