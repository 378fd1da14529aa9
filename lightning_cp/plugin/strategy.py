"""`ContextParallelStrategy` for `lightning.pytorch`."""

from lightning.pytorch.strategies.parallel import ParallelStrategy

from lightning_cp.plugin.base import ContextParallelBase
from lightning_cp.plugin.flavor import Flavor


class ContextParallelStrategy(ContextParallelBase, ParallelStrategy):
    """For the Trainer of `lightning.pytorch`; the options are those of `ContextParallelBase`."""

    _flavor = Flavor("lightning.pytorch", "lightning.fabric")


ContextParallelStrategy.__doc__ = ContextParallelBase.__doc__
