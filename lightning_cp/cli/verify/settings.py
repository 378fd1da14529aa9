"""Model, first training batch and options from a configuration file of LightningCLI."""

import sys
from argparse import ArgumentError
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.errors import ConfigError

OPTIONS = (
    "layout",
    "exchange",
    "attention_backend",
    "documents",
    "loss",
    "sequence_dims",
    "pad_to_multiple_of",
)
"""Options of the strategy that say how a step is computed; the others do not change its outcome."""
PACKAGES = ("lightning", "pytorch_lightning")
NEEDS = "jsonargparse[signatures]"


class Settings:
    """A configuration as `LightningCLI --print_config` writes it, whole or of the command `fit`.

    Args:
        file: a YAML file with `model` and, where the model has no loader of its own, `data`, each
            with class_path and init_args; classes are found from its folder and the working one.

    Raises:
        ConfigError: if there is no such file, or it holds no such thing.
    """

    def __init__(self, file: str) -> None:
        if not Path(file).is_file():
            raise ConfigError(f"there is no file {file!r}; write the path of a YAML file")
        found = import_module("yaml").safe_load(Path(file).read_text(encoding="utf-8"))
        found = found.get("fit", found) if isinstance(found, dict) else found
        for key in ("model", "data"):
            value = found.get(key) if isinstance(found, dict) else None
            if value is None and key == "data":
                continue
            if not (isinstance(value, dict) and "class_path" in value):
                raise ConfigError(
                    f"{key!r} of {file!r} has no class_path, so its class is known to your script "
                    f"alone; write class_path and init_args, or use FILE.py:FUNCTION"
                )
        self.file, self._found = file, found

    @property
    def strategy(self) -> dict[str, Any]:
        """Arguments of a context-parallel strategy as they are written, none for any other."""
        value: Any = (self._found.get("trainer") or {}).get("strategy")
        if not isinstance(value, dict):
            return {}
        ours = str(value.get("class_path")).endswith("ContextParallelStrategy")
        return dict(value.get("init_args") or {}) if ours else {}

    @property
    def ranks(self) -> int:
        """Ranks that share a sequence: what the strategy says, 2 where that is "auto"."""
        size = self.strategy.get("context_parallel_size", "auto")
        return size if isinstance(size, int) else 2

    def options(self) -> dict[str, Any]:
        """Options for `lightning_cp.config.Config`, checked against the strategy's arguments.

        Raises:
            ConfigError: if the strategy does not take them.
        """
        if not self.strategy:
            return {}
        _, found = self._parsed("strategy", self._found["trainer"]["strategy"])
        return {name: found["strategy"]["init_args"][name] for name in OPTIONS}

    def build(self, seed: int) -> tuple[torch.nn.Module, Any]:
        """The model and the first training batch, as a Trainer on one device would make them.

        Every rank calls this; `prepare_data` runs on rank 0 alone. Parameters and random numbers of
        the batch follow the seed on every rank.

        Raises:
            ConfigError: if a class cannot be made from its arguments, or gives no batch.
        """
        sys.path.insert(0, str(Path(self.file).resolve().parent))
        torch.manual_seed(seed)
        model = self._made("model")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"'model' of {self.file!r} is {type(model).__name__}, no torch module"
            )
        source: Any = self._made("data") if self._found.get("data") is not None else model
        if not _own(source, "train_dataloader"):
            raise ConfigError(
                f"{type(source).__name__} of {self.file!r} has no train_dataloader; add 'data'"
            )
        parts = [source] if source is model else [source, model]
        for part in parts if dist.get_rank() == 0 else ():
            _call(part, "prepare_data")
        dist.barrier()
        torch.manual_seed(seed)
        for part in parts:
            _call(part, "setup", "fit")
        _call(model, "configure_model")
        batch = next(iter(source.train_dataloader()))
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            batch = _call(source if _own(source, hook) else model, hook, batch, 0, otherwise=batch)
        return model, batch

    def _made(self, key: str) -> Any:
        parser, found = self._parsed(key, self._found[key])
        made = getattr(parser, "instantiate", None) or parser.instantiate_classes
        return made(found)[key]

    def _parsed(self, key: str, value: Any) -> tuple[Any, Any]:
        """Parser and parsed value of a class_path with init_args."""
        module, _, name = value["class_path"].rpartition(".")
        try:
            parser = import_module("jsonargparse").ArgumentParser(exit_on_error=False)
            parser.add_subclass_arguments(getattr(import_module(module), name), key, required=True)
            return parser, parser.parse_object({key: value})
        except ModuleNotFoundError as error:
            needs = f"; pip install '{NEEDS}'" if error.name == "jsonargparse" else ""
            raise ConfigError(f"{key!r} of {self.file!r}: {error}{needs}") from error
        except (ArgumentError, AttributeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"{key!r} of {self.file!r}: {text}") from error


def _call(owner: Any, name: str, *args: Any, otherwise: Any = None) -> Any:
    """What a hook returns, `otherwise` where there is none."""
    hook = getattr(owner, name, None)
    return otherwise if hook is None else hook(*args)


def _own(owner: Any, name: str) -> bool:
    """Whether a class has the hook, and not from Lightning: the Trainer asks the data first."""
    hook = getattr(type(owner), name, None)
    return hook is not None and hook.__module__.partition(".")[0] not in PACKAGES
