"""Samplers count virtual devices: peers read the same samples, groups read different ones."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, SubsetRandomSampler

from tests._harness.models import Case, Outcome, Text, fit, outcome, seeded, trainer_of

pytestmark = pytest.mark.dist

TWO_BY_TWO = {"context_parallel_size": 2}
SIXTEEN = Case(samples=16, batch=1, lengths=(8,))


def epochs(found: Outcome, size: int) -> list[list[int]]:
    return [found.ids[i : i + size] for i in range(0, len(found.ids), size)]


def fit_subset(rank: int, world: int, case: Case, options: dict[str, Any]) -> Outcome:
    """The loader has a sampler of the user's."""
    model = seeded(case)
    data = Text(case, case.samples)
    loader = DataLoader(data, batch_size=case.batch, sampler=SubsetRandomSampler(range(1, 8)))
    trainer = trainer_of(rank, world, case, options)
    trainer.fit(model, loader)
    return outcome(trainer, model)


def test_sixteen_samples_are_eight_steps_on_two_by_two(pool):
    found = pool.run(fit, SIXTEEN, TWO_BY_TWO, world=4)
    assert found[0].ids == found[1].ids
    assert found[2].ids == found[3].ids
    assert not set(found[0].ids) & set(found[2].ids)
    assert sorted(found[0].ids + found[2].ids) == list(range(16))
    for rank in found:
        assert rank.counts == {
            "optimiser steps": 8,
            "batches of an epoch": 8,
            "estimated steps": 8,
        }


def test_epochs_differ_in_order_and_split(pool):
    case = Case(samples=16, batch=1, lengths=(8,), epochs=2)
    found = pool.run(fit, case, TWO_BY_TWO, world=4)
    first, second = zip(*(epochs(rank, 8) for rank in (found[0], found[2])), strict=True)
    for one, other in (first, second):
        assert sorted(one + other) == list(range(16))
    assert first != second
    assert [found[1].ids, found[3].ids] == [found[0].ids, found[2].ids]
    assert found[0].counts["estimated steps"] == found[0].counts["optimiser steps"] == 16


@pytest.mark.parametrize(("world", "steps"), [(2, 16), pytest.param(3, 16, marks=pytest.mark.full)])
def test_one_group_keeps_the_order_of_the_loader(world, steps, pool):
    for rank in pool.run(fit, SIXTEEN, {}, world=world):
        assert rank.ids == list(range(16))
        assert rank.counts["optimiser steps"] == rank.counts["batches of an epoch"] == steps


def test_one_group_keeps_the_sampler_of_the_user(pool):
    case = Case(samples=9, batch=2, lengths=(8,))
    (plain,) = pool.run(fit_subset, case, None, world=1)
    assert sorted(plain.ids) == list(range(1, 8))
    assert plain.ids != sorted(plain.ids)
    for rank in pool.run(fit_subset, case, {}, world=2):
        assert rank.ids == plain.ids
        assert rank.counts == plain.counts


def test_uneven_samples_are_repeated_as_by_the_plain_trainer(pool):
    case = Case(samples=5, batch=2, lengths=(8,))
    plain = pool.run(fit, case, None, world=2)
    found = pool.run(fit, case, TWO_BY_TWO, world=4)
    assert [rank.ids for rank in found] == [plain[i // 2].ids for i in range(4)]
    assert {len(rank.ids) for rank in found} == {3}
