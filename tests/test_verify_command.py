"""`lightning-cp verify`: exit codes, messages and the JSON file."""

import json
from pathlib import Path

import pytest

from lightning_cp.cli.main import main
from lightning_cp.cli.verify.command import _dims

pytestmark = pytest.mark.timeout(300)  # every test starts a few processes

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from lightning_cp import functional


class Net(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers
        self.wte, self.wpe, self.out = nn.Embedding(9, 8), nn.Embedding(20, 8), nn.Linear(8, 9)

    def forward(self, input_ids, labels):
        x = self.wte(input_ids) + self.wpe(self.numbers(input_ids.shape[1]))
        q = x[:, None]
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def batch():
    x = torch.randint(0, 9, (2, 18))
    return {"input_ids": x[:, :-1], "labels": x[:, 1:]}


def right():
    return Net(functional.positions), batch()


def wrong():
    return Net(torch.arange), batch()


def neither():
    return 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verify") / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_equal_is_zero(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    assert main(["verify", f"{model}:right", "--ranks", "3", "--json", str(found)]) == 0
    out, err = capfd.readouterr()
    assert out.count("verdict") == 1
    assert "different" not in err
    value = json.loads(found.read_text())
    assert value["ok"]
    assert value["finding"] is None
    assert value["attention"] == [1, 1]
    assert value["worst_gradient"] < 1


@pytest.mark.full  # tests/test_verify_config.py has a difference
def test_different_is_one(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    assert main(["verify", f"{model}:wrong", "--json", str(found)]) == 1
    err = capfd.readouterr().err
    assert "different: the root module (Net, model.py:" in err
    assert "functional.positions(" in err
    assert json.loads(found.read_text())["finding"]["module"] == ""


def test_what_is_no_model_is_two(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{model}:neither"]) == 2
    assert "returned int; return (module, batch)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.py"], "names no function; write FILE.py:FUNCTION"),
        (["nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["{model}:right", "--ranks", "1"], "--ranks 1 is less than 2"),
        (["{model}:right", "--max-tokens", "0"], "--max-tokens 0 is less than 1"),
        (["{model}:right", "--sequence-dim", "x"], "is not NAME=DIM"),
        (["{model}:right", "--sequence-dim", "x=tgt:1:cut"], "tokens=target:1 where"),
    ],
)
def test_bad_options_start_nothing(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *(text.format(model=model) for text in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_sequence_dims_name_their_sequence() -> None:
    found = _dims(["a=-1", "b=tgt:1", "c.d=image:0:whole", "e=f=2"])
    assert found == {"a": -1, "b": ("tgt", 1), "c.d": ("image", 0, "whole"), "e=f": 2}
