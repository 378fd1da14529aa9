"""The strategy of both Lightning packages: which one a name means, and what a wrong one says."""

import inspect

import lightning.pytorch
import pytest
import pytorch_lightning

import lightning_cp
from lightning_cp import plugin
from lightning_cp.plugin import pytorch_lightning as other
from lightning_cp.plugin import strategy as usual
from lightning_cp.plugin.base import ContextParallelBase

PACKAGES = {lightning.pytorch: usual, pytorch_lightning: other}
OPTIONS = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
PRESETS = {"context_parallel": 0, **{f"context_parallel_zero{stage}": stage for stage in range(4)}}


@pytest.fixture(params=PACKAGES, ids=lambda package: package.__name__)
def package(request):
    return request.param


def test_with_both_the_public_one_is_that_of_lightning():
    assert lightning_cp.ContextParallelStrategy is usual.ContextParallelStrategy
    assert plugin.ContextParallelStrategy is usual.ContextParallelStrategy
    for module in (lightning_cp, plugin):
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018  (an attribute that is not there)


@pytest.mark.parametrize(("name", "stage"), PRESETS.items())
def test_presets(name, stage, package):
    strategy = package.Trainer(strategy=name, **OPTIONS).strategy
    assert type(strategy) is PACKAGES[package].ContextParallelStrategy
    assert strategy._config.zero_stage == stage


def test_registers_itself_like_other_strategies(package):
    class Registry(dict):
        register = package.strategies.StrategyRegistry.__class__.register

    registry, own = Registry(), PACKAGES[package].ContextParallelStrategy
    for _ in range(2):
        own.register_strategies(registry)
    assert {name: data["init_params"].get("zero_stage", 0) for name, data in registry.items()} == (
        PRESETS
    )
    assert all(data["strategy"] is own for data in registry.values())


def test_wrong_pairing_names_the_right_class(package):
    (wrong,) = (module for found, module in PACKAGES.items() if found is not package)
    right = f"{PACKAGES[package].__name__}.ContextParallelStrategy"
    named = rf"the Trainer of {wrong.ContextParallelStrategy._flavor.pytorch}; .*takes {right}`"
    with pytest.raises(ValueError, match=named):
        package.Trainer(strategy=wrong.ContextParallelStrategy(), **OPTIONS)


def test_classes_have_one_code_and_documentation(package):
    own = PACKAGES[package].ContextParallelStrategy
    assert issubclass(own, ContextParallelBase)
    assert issubclass(own, package.strategies.ParallelStrategy)
    assert inspect.getdoc(own) == inspect.getdoc(ContextParallelBase)
    assert set(vars(own)) - {"_abc_impl"} == {
        "__module__",
        "__doc__",
        "__abstractmethods__",
        "_checkpoint_class",
        "_flavor",
    }


def test_names_of_a_package_are_its_own(package):
    flavor = PACKAGES[package].ContextParallelStrategy._flavor
    copies = {"lightning.pytorch": {"lightning"}}
    roots = copies.get(package.__name__, {"pytorch_lightning", "lightning_fabric"})
    values = [value for value in vars(flavor).values() if not isinstance(value, str | tuple | bool)]
    modules = {getattr(value, "__module__", type(value).__module__) for value in values}
    assert {name.partition(".")[0] for name in modules} - {"lightning_utilities"} == roots
