"""Where the processes of a run come from: the ranks of this node and how they are started."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from typing_extensions import override

from lightning_cp import fsdp
from lightning_cp.errors import ConfigError
from lightning_cp.plugin.flavor import Flavor

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as Host
else:
    Host = object  # a concrete class brings the ParallelStrategy of its package

StartMethod = Literal["auto", "popen", "spawn", "fork"]
METHODS = ("auto", "popen", "spawn", "fork")


def checked(method: StartMethod) -> StartMethod:
    """A start method that is one.

    Raises:
        ConfigError: if it is not.
    """
    if method not in METHODS:
        raise ConfigError(f"start_method={method!r} is unknown; use one of {', '.join(METHODS)}")
    return method


class Launching(Host):
    """Numbers the ranks of a node, and starts those that nobody else starts."""

    _flavor: ClassVar[Flavor]
    _num_nodes: int = 1
    _start_method: StartMethod = "auto"
    _hands_over: bool = False

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank; called by the Trainer."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in self._flavor.rank_zero_decorators:
            decorator.rank = self.global_rank

    @override
    def _configure_launcher(self) -> None:
        """Choose who starts the other processes of this node.

        Raises:
            ConfigError: if each of the processes that somebody else started would start others.
        """
        environment = self.cluster_environment
        if environment is None or self.num_processes * self.num_nodes == 1:
            return
        started = environment.creates_processes_externally
        method = self._start_method
        if method == "auto":
            method = "fork" if self._flavor.interactive and not started else "popen"
        if method == "popen":
            self._launcher = self._flavor.script_launcher(
                environment, self.num_processes, self.num_nodes
            )
            return
        if started:
            raise ConfigError(
                f"start_method={method!r} starts the processes of a node, but "
                f"{type(environment).__name__} says that they have been started already, and this "
                f"is one of them; leave start_method out"
            )
        self._launcher = self._flavor.process_launcher(self, start_method=method)
        self._hands_over = True

    def teardown(self) -> None:
        """End a run; a process that was started for it hands whole parameters back."""
        super().teardown()
        module: Any = self.lightning_module
        if self._hands_over and module is not None and fsdp.is_sharded(module):
            module.register_state_dict_post_hook(_put_together)


def _put_together(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the parts in a state dict by whole tensors; a collective call of all ranks."""
    if not prefix:  # the root's, when those of all its parts are there
        state.update({name: fsdp.whole(value, keep=True) for name, value in state.items()})
