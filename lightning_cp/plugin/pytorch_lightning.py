"""`ContextParallelStrategy` for `pytorch_lightning`."""

from pytorch_lightning.strategies.parallel import ParallelStrategy

from lightning_cp.plugin.base import ContextParallelBase
from lightning_cp.plugin.flavor import Flavor


class ContextParallelStrategy(ContextParallelBase, ParallelStrategy):  # type: ignore[misc]
    """For the Trainer of `pytorch_lightning`; the options are those of `ContextParallelBase`."""

    _flavor = Flavor("pytorch_lightning", "lightning_fabric")


ContextParallelStrategy.__doc__ = ContextParallelBase.__doc__
