"""The example in nanoGPT's style: refused as people write it, equal to one device as it stands."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelStrategy
from tests._harness.pool import Pool
from tests._harness.trainer import pool_trainer

pytestmark = pytest.mark.dist

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nanogpt.py"
LENGTH, BATCH, STEPS = 17, 2, 3

POSITIONS = (
    "pos = functional.positions(T, device=tokens.device)",
    "pos = torch.arange(0, T, dtype=torch.long, device=tokens.device)",
)
SHIFT = (
    """\
        logits, labels = self.gpt(tokens), functional.shift_labels(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
""",
    """\
        logits = self.gpt(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
""",
)
SHIFT_BEFORE = (
    SHIFT[0],
    """\
        logits, labels = self.gpt(tokens[:, :-1]), tokens[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
""",
)
Change = tuple[str, str]


def example(*changes: Change) -> ModuleType:
    """The example, with lines written as on one device."""
    source = EXAMPLE.read_text()
    for found, changed in changes:
        assert source.count(found) == 1, found
        source = source.replace(found, changed)
    module = ModuleType("nanogpt")
    exec(compile(source, str(EXAMPLE), "exec"), vars(module))
    return module


class Run(NamedTuple):
    """Losses, gradients and parameters after every step."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


def fit(rank: int, world: int, changes: tuple[Change, ...], options: Any) -> Run:
    """Some steps in double; on one device where there are no options."""
    module, run = example(*changes), Run([], [], [])

    class Recorded(module.LanguageModel):  # type: ignore[name-defined, misc]
        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            loss = super().training_step(tokens, index)
            run.losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            run.gradients.append({n: p.grad.clone() for n, p in self.named_parameters()})

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            run.parameters.append({n: p.detach().clone() for n, p in self.named_parameters()})

    L.seed_everything(5, verbose=False)
    strategy = "auto" if options is None else ContextParallelStrategy(**options)
    trainer = pool_trainer(rank, world, strategy, max_steps=STEPS, precision="64-true")
    trainer.fit(Recorded(), DataLoader(module.Text(LENGTH), batch_size=BATCH))
    return run


@cache
def one_device(pool: Pool, *changes: Change) -> Run:
    (found,) = pool.run(fit, changes, None, world=1)
    assert len(found.losses) == len(found.gradients) == len(found.parameters) == STEPS
    return found


def assert_equal(found: Run, expected: Run) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=1e-10)
    for kind in ("gradients", "parameters"):
        for step, wanted in enumerate(getattr(expected, kind)):
            got = getattr(found, kind)[step]
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                difference = (got[name] - value).abs().max().item()
                assert difference < 1e-10, f"{kind} of {name}, step {step}: off by {difference}"


@pytest.mark.parametrize("changes", [(POSITIONS, SHIFT), (POSITIONS, SHIFT_BEFORE)])
def test_the_changed_lines_mean_the_same_on_one_device(
    changes: tuple[Change, ...], pool: Pool
) -> None:
    assert_equal(one_device(pool, *changes), one_device(pool))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3])
def test_losses_gradients_and_steps_equal_one_device(world: int, layout: str, pool: Pool) -> None:
    expected = one_device(pool, POSITIONS, SHIFT)  # as people write it
    for found in pool.run(fit, (), {"layout": layout}, world=world):
        assert_equal(found, expected)


REFUSED: dict[str, tuple[tuple[Change, ...], str, str]] = {
    "as people write it": ((POSITIONS, SHIFT), r"module 'gpt' \(GPT, ", r"functional\.positions\("),
    "arange": ((POSITIONS,), r"module 'gpt' \(GPT, ", r"functional\.positions\("),
    "shift": ((SHIFT,), r"the root module \(Recorded, ", r"functional\.shift_labels"),
    "shift before": ((SHIFT_BEFORE,), r"the root module \(Recorded, ", r"functional\.shift_labels"),
}


@pytest.mark.parametrize(("changes", "where", "remedy"), REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_one_device_lines_are_refused_on_every_rank(
    layout: str, changes: tuple[Change, ...], where: str, remedy: str, pool: Pool
) -> None:
    for failure in pool.failures(fit, changes, {"layout": layout}, world=2):
        assert failure.kind == "RefusedError"
        assert re.search(f"{where}.*{remedy}", failure.message), failure.message


@pytest.mark.full  # .ci/run runs it, too
def test_the_example_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("the losses are equal\n") == 1
    assert not list(tmp_path.iterdir())
