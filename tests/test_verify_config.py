"""`lightning-cp verify --config`: what a configuration of LightningCLI says is what is verified."""

import json
import sys
from pathlib import Path

import pytest

from lightning_cp.cli.main import main
from lightning_cp.cli.verify.settings import OPTIONS, Settings
from lightning_cp.config import Config
from lightning_cp.errors import ConfigError

FILES = Path(__file__).resolve().parent / "cli"
MODEL = "model: {class_path: tiny.Tiny}\n"
STRATEGY = "class_path: lightning_cp.ContextParallelStrategy"


@pytest.fixture
def write(tmp_path: Path):
    file = tmp_path / "config.yaml"

    def written(text: str) -> str:
        file.write_text(text)
        return str(file)

    return written


@pytest.mark.full  # tests/test_verify_command.py has a right model
def test_right_model_with_the_options_of_its_strategy(tmp_path, capfd):
    found = tmp_path / "found.json"
    arguments = ["--config", str(FILES / "by_class.yaml"), "--json", str(found)]
    assert main(["verify", *arguments]) == 0
    value = json.loads(found.read_text())
    assert value["ok"]
    assert value["attention"] == [1, 1]
    printed = capfd.readouterr().out
    assert "contiguous, allgather" in printed
    assert "21" in printed


@pytest.mark.full  # tests/test_verify_command.py has a wrong model
def test_wrong_model_and_options_of_the_command_line(capfd):
    arguments = ["--config", str(FILES / "overridden.yaml"), "--ranks", "3", "--layout", "zigzag"]
    assert main(["verify", *arguments]) == 1
    out, err = capfd.readouterr()
    assert "zigzag, direct" in out
    assert "positions built from the local length" in err


def test_model_without_a_loader_and_a_wrong_option(write, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(FILES)])
    given = f"{{strategy: {{{STRATEGY}, init_args: {{layout: spiral}}}}}}"
    settings = Settings(write(f"fit:\n  model: {{class_path: tiny.Tiny}}\n  trainer: {given}\n"))
    with pytest.raises(ConfigError, match=r"Tiny of '.*' has no train_dataloader; add 'data'"):
        settings.build(seed=0)
    with pytest.raises(ConfigError, match=r"'strategy' of .*layout.*value: spiral"):
        settings.options()
    settings = Settings(write("model: {class_path: tiny.Tiny, init_args: {widt: 3}}\n"))
    with pytest.raises(ConfigError, match=r"'model' of .*'widt' is not accepted"):
        settings.build(seed=0)


def test_options_are_those_of_the_strategy(write):
    given = "init_args: {context_parallel_size: 3, loss: token_mean, verify: first_batch}"
    settings = Settings(write(MODEL + f"trainer: {{strategy: {{{STRATEGY}, {given}}}}}\n"))
    options = settings.options()
    assert settings.ranks == 3
    assert tuple(options) == OPTIONS
    assert Config(**options) == Config(loss="token_mean")
    for strategy in ("ddp", "context_parallel", "{class_path: lightning.pytorch.X}"):
        settings = Settings(write(MODEL + f"trainer: {{strategy: {strategy}}}\n"))
        assert (settings.ranks, settings.options()) == (2, {})


def test_jsonargparse_is_asked_for(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    given = f"trainer: {{strategy: {{{STRATEGY}, init_args: {{layout: zigzag}}}}}}\n"
    with pytest.raises(ConfigError, match=r"pip install 'jsonargparse\[signatures\]'"):
        Settings(write(MODEL + given)).options()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "'model' of '.*' has no class_path"),
        ("model: {width: 3}\n", "'model' of '.*' has no class_path"),
        (MODEL + "data: {length: 3}\n", "'data' of '.*' has no class_path.*FILE.py:FUNCTION"),
        (
            MODEL
            + f"trainer: {{strategy: {{{STRATEGY}, init_args: {{context_parallel_size: 1}}}}}}",
            "context_parallel_size=1 of '.*' is less than 2",
        ),
    ],
)
def test_bad_files_start_nothing(text, message, write, capsys):
    assert main(["verify", "--config", write(text)]) == 2
    error = capsys.readouterr().err
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "FILE.py:FUNCTION or --config FILE.yaml, one of the two"),
        (["model.py:f", "--config", "x.yaml"], "one of the two"),
        (["--config", "nowhere.yaml"], "there is no file 'nowhere.yaml'"),
    ],
)
def test_bad_options_start_nothing(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
