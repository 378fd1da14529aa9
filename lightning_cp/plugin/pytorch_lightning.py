"""`ContextParallelStrategy` and `ContextParallelMonitor` for `pytorch_lightning`."""

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies.parallel import ParallelStrategy

from lightning_cp.plugin.aside import WritesAside
from lightning_cp.plugin.base import ContextParallelBase
from lightning_cp.plugin.flavor import Flavor
from lightning_cp.plugin.monitor import MonitorBase


class AsideCheckpointIO(WritesAside, TorchCheckpointIO):
    """Files of the Trainer of `pytorch_lightning` are written aside, synced and renamed."""


class ContextParallelStrategy(ContextParallelBase, ParallelStrategy):  # type: ignore[misc]
    """For the Trainer of `pytorch_lightning`; the options are those of `ContextParallelBase`."""

    _checkpoint_class = AsideCheckpointIO
    _flavor = Flavor("pytorch_lightning", "lightning_fabric")


class ContextParallelMonitor(MonitorBase, Callback):
    """For the Trainer of `pytorch_lightning`; what it logs is said at `MonitorBase`."""


ContextParallelMonitor.__doc__ = MonitorBase.__doc__
ContextParallelStrategy.__doc__ = ContextParallelBase.__doc__
