"""What a strategy does otherwise where parameters are sharded: setup, steps, backward."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_cp import fsdp
from lightning_cp.compat import before_backward
from lightning_cp.errors import ConfigError
from lightning_cp.gradients import clip_grad_norm, clip_grad_value
from lightning_cp.materialize import has_meta
from lightning_cp.plugin.checkpoints import Checkpoints, parameters_of


class ShardedParameters(Checkpoints):
    """What is otherwise in a run whose parameters are sharded.

    With `zero_stage=0`, and on one rank, everything is left to the class behind.
    """

    _accumulating = False

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, which must train the sharded parameters.

        Raises:
            ConfigError: on every rank alike, if an optimizer has other parameters.
        """
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if module is None or not self._sharded:
            return
        own = {id(x) for x in module.parameters()}
        for optimizer in self.optimizers:
            lost = sum(id(x) not in own for x in parameters_of(optimizer))
            if lost:
                raise ConfigError(
                    f"sharded parameters: {lost} parameters of {type(optimizer).__name__} are not "
                    f"(or no longer) parameters of the module, so nothing would be trained; "
                    f"sharding replaces parameters: make the optimizer in configure_optimizers, "
                    f"not before, from self.parameters()"
                )
            _check_groups(optimizer)

    def setup_precision_plugin(self) -> None:
        """Let gradients be clipped by the norm of all their parts."""
        super().setup_precision_plugin()
        if self._sharded:
            own, plugin = vars(self.precision_plugin), self.precision_plugin

            def by_norm(optimizer: Any, clip_val: float) -> None:
                clip_grad_norm(plugin.main_params(optimizer), clip_val)

            def by_value(optimizer: Any, clip_val: float) -> None:
                clip_grad_value(plugin.main_params(optimizer), clip_val)

            own["clip_grad_by_norm"], own["clip_grad_by_value"] = by_norm, by_value

    @contextmanager
    def _accumulate(self) -> Generator[None, None, None]:
        """Backwards inside do not finish the sums of gradients."""
        if self.lightning_module is None:
            yield
            return
        self._accumulating = True
        try:
            with fsdp.without_sync(self.lightning_module, whole=self._config.whole_gradients):
                yield
        finally:
            self._accumulating = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average what sharding leaves whole, unless more is accumulated first."""
        super().post_backward(closure_loss)
        if self._mesh is not None and self.lightning_module is not None and not self._accumulating:
            fsdp.average_loose(self.lightning_module, group=self._mesh.grad)

    def _see_backward(self, loss: Tensor) -> None:
        """A backward inside a step has to be announced: the step has not returned its loss."""
        if self.lightning_module is not None and self._sharded:
            before_backward(self.lightning_module, loss)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, with the buffers of the first virtual device."""
        self._broadcast_buffers()
        return super().predict_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step; parameters that are gathered are out of date then."""
        found = super().optimizer_step(optimizer, *args, **kwargs)
        self._reshard()
        return found

    def on_validation_end(self) -> None:
        """Free what a validation gathered."""
        self._reshard()

    def on_test_end(self) -> None:
        """Free what a test gathered."""
        self._reshard()

    def on_predict_end(self) -> None:
        """Free what a prediction gathered."""
        self._reshard()

    def _reshard(self) -> None:
        if self.lightning_module is not None and self._shards:
            fsdp.reshard(self.lightning_module)

    def _broadcast_buffers(self) -> None:
        """Buffers follow the first virtual device where there are several, as with DDP."""
        if self._shards and self._mesh is not None and self._mesh.topology.dp > 1:
            module: Any = self.lightning_module
            fsdp.broadcast(module.buffers(), group=self._mesh.grad)

    def teardown(self) -> None:
        """End a run; sharded parameters stay where they are, on the device of their group."""
        module: Any = self.lightning_module
        if module is None or not (self._sharded or has_meta(module)):
            super().teardown()
            return
        try:
            self._end_saves()
        finally:
            fsdp.reshard(module)
            for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
                if part is not None:
                    part.teardown()
            self.checkpoint_io.teardown()


def _check_groups(optimizer: Any) -> None:
    """Kernels over several tensors at once do not take sharded and whole ones together."""
    for group in optimizer.param_groups:
        fast = [name for name in ("foreach", "fused") if group.get(name)]
        scalars = sum(x.ndim == 0 for x in group["params"])
        if fast and 0 < scalars < len(group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}({fast[0]}=True) updates all parameters of a group at "
                f"once, but {scalars} of them have no dimensions and are not sharded as the others "
                f"are; give those a group of their own"
            )
