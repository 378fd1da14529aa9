"""Names of one Lightning package: `lightning.pytorch` and `pytorch_lightning` are two copies.

Classes of the one mean nothing to the other, so a strategy must use those of its own Trainer.
"""

from importlib import import_module
from typing import Any


class Flavor:
    """What the strategy needs of a package beside the base class.

    Args:
        pytorch: the package with the Trainer; its modules are imported here.
        fabric: the package below it.
    """

    def __init__(self, pytorch: str, fabric: str) -> None:
        self.pytorch = pytorch
        distributed = import_module(f"{fabric}.utilities.distributed")
        self.default_backend: Any = distributed._get_default_process_group_backend_for_device
        self.connect: Any = distributed._init_dist_connection
        self.reduce: Any = distributed._sync_ddp_if_available
        self.all_gather: Any = distributed._all_gather_ddp_if_available
        optimizer = import_module(f"{fabric}.utilities.optimizer")
        self.optimizers_to_device: Any = optimizer._optimizers_to_device
        seed = import_module(f"{fabric}.utilities.seed")
        self.reset_seed: Any = seed.reset_seed
        self.seed_worker: Any = seed.pl_worker_init_function
        below, above = (import_module(f"{name}.utilities.rank_zero") for name in (fabric, pytorch))
        self.rank_zero_decorators: Any = (below.rank_zero_only, above.rank_zero_only)
        self.rank_zero_info: Any = above.rank_zero_info
        overrides = import_module(f"{pytorch}.overrides.distributed")
        self.sync_module_states: Any = overrides._sync_module_states
        self.prepare_for_backward: Any = overrides.prepare_for_backward
        self.is_overridden: Any = import_module(f"{pytorch}.utilities.model_helpers").is_overridden
        launchers = import_module(f"{pytorch}.strategies.launchers")
        self.script_launcher: Any = launchers._SubprocessScriptLauncher
        self.process_launcher: Any = launchers._MultiProcessingLauncher
        self.interactive: bool = import_module(f"{fabric}.utilities.imports")._IS_INTERACTIVE
        ddp = import_module(f"{pytorch}.strategies.ddp")
        self.forward_redirection: Any = ddp._DDPForwardRedirection
        self._torch_io: Any = import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO
        self._wrapping_io: Any = import_module(
            f"{pytorch}.plugins.io.wrapper"
        )._WrappingCheckpointIO
        self.fitting: Any = import_module(f"{pytorch}.trainer.states").TrainerFn.FITTING

    def write_aside(self, io: Any, kind: type[Any]) -> None:
        """Let a CheckpointIO that wraps the package's own, or nothing yet, wrap one of a kind."""
        while isinstance(io, self._wrapping_io):
            inner = io._checkpoint_io
            if inner is None or type(inner) is self._torch_io:
                io._checkpoint_io, io._base_checkpoint_io_configured = kind(), True
            io = inner
