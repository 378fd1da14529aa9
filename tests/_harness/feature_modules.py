"""The GPT with something that a user's module may do, for the rows of the feature table."""

from typing import Any

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests._harness.models import Case, LanguageModel, Text, loaders


class Model(LanguageModel):
    """The GPT; what it saw beside the ids is in `seen`."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.seen: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(tokens)
        return logits

    def predict_step(self, batch: Any, index: int) -> Any:
        """Logits and ids."""
        tokens, _, ids, *rest = self.fields(batch)
        return {"logits": self.net(tokens, *rest), "ids": ids}

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """What a logger would see."""
        metrics = self.trainer.callback_metrics
        if "train_loss_step" in metrics:
            self.logged.append(float(metrics["train_loss_step"]))


class Failing(Model):
    """Fails in the fourth step, on every rank."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss, or an error."""
        if index == 3:
            raise ArithmeticError("the user's own error")
        return super().training_step(batch, index)


class Inference(Model):
    """Notes whether inference mode is on."""

    def validation_step(self, batch: Any, index: int) -> None:
        """Note, and log the loss."""
        self.seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        super().validation_step(batch, index)


class Quiet(Model):
    """Logs nothing."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss."""
        self.ids += self.fields(batch)[2].tolist()
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        """Nothing is logged."""
        self.loss(batch)


class Reloading(Model):
    """Makes a loader for every epoch, each with other samples."""

    def train_dataloader(self) -> Any:
        """Samples that nobody has seen."""
        self.seen.append(self.trainer.current_epoch)
        data = Text(self.case, self.case.samples, first=31 * len(self.seen))
        return DataLoader(data, batch_size=self.case.batch)

    def val_dataloader(self) -> Any:
        """The usual samples."""
        return loaders(self.case)[1]


class Transferring(Model):
    """Looks at whole batches on their way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Notes the length of the rows."""
        self.seen.append(batch["input_ids"].shape[1])
        return batch


class Several(Model):
    """Validates on two loaders."""

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        """Log the loss of each."""
        self.log("val_loss", self.loss(batch))


class Scheduled(Model):
    """A scheduler for every step."""

    def configure_optimizers(self) -> Any:
        """SGD that decays with every step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Note the rate."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append([group["lr"] for x in self.trainer.optimizers for group in x.param_groups])


class Plateau(Scheduled):
    """A scheduler that looks at a metric."""

    def configure_optimizers(self) -> Any:
        """Halves the rate at once: the metric is to rise, and falls."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Quadratic(Model):
    """LBFGS calls the step several times for one batch."""

    def configure_optimizers(self) -> Any:
        """Three evaluations of every batch."""
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoOptimizers(Model):
    """Two optimizers by hand, each with half of the parameters."""

    toggles = False

    def configure_optimizers(self) -> Any:
        """One for the head, one for the rest."""
        head = list(self.net.head.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("head")]
        return [torch.optim.SGD(head, lr=0.2), torch.optim.Adam(rest, lr=1e-3, eps=1e-3)]

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        """A backward and a step of each."""
        self.ids += self.fields(batch)[2].tolist()
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


class Toggling(TwoOptimizers):
    """Only the parameters of the running optimizer have gradients."""

    toggles = True


class Alternating(Model):
    """Uses a layer in every other step."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, index: int) -> Tensor:
        """With the layer, or without."""
        loss = super().training_step(batch, index)
        more: Tensor = 0.1 * (self.scale - 2).square().sum()
        return loss + more if index % 2 else loss


class Hyper(Model):
    """Saves its hyperparameters."""

    def __init__(self, case: Case, dense: bool = False, width: int = 5) -> None:
        super().__init__(case, dense)
        self.save_hyperparameters("width")


class Gathering(Model):
    """Collects a value of every virtual device, and logs its mean."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Gather ids and losses, in shape and values."""
        loss = super().training_step(batch, index)
        both: Any = self.all_gather({"ids": batch["id"], "loss": loss.detach()})
        self.seen.append({name: value.numpy() for name, value in both.items()})
        self.log("synced", loss, sync_dist=True, on_epoch=True, on_step=False)
        self.log_dict({"a": loss, "b": 2 * loss}, prog_bar=True, on_epoch=True, on_step=False)
        return loss


class Norms(Model):
    """Looks at gradients before they are used."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the norm of every gradient."""
        from lightning.pytorch.utilities import grad_norm

        norms = grad_norm(self, norm_type=2)
        self.seen.append({name: float(value) for name, value in norms.items()})

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip to a tenth."""
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Late(Model):
    """Makes its network in configure_model."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.made_at, self.held = self.net, self.net
        del self.net

    def configure_model(self) -> None:
        """Make it, once."""
        if not hasattr(self, "net"):
            self.net = self.held
            del self.held, self.made_at


class Iterating(Model):
    """Takes the iterator."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        """Fetch a batch."""
        return self.loss(next(dataloader_iter)[0])


class Normalised(Model):
    """Has a batch norm beside the network."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.statistics = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Use both."""
        norm = self.statistics(torch.ones(2, 4, dtype=torch.float64))
        loss: Tensor = super().training_step(batch, index) + 0 * norm.sum()
        return loss


class Example(Model):
    """Has an example input for the summary."""

    def __init__(self, case: Case, dense: bool = False) -> None:
        super().__init__(case, dense)
        self.example_input_array = torch.zeros(2, 24, dtype=torch.int64)
