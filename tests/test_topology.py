"""Sizes given by the user become a grid of ranks, or an error that says what to write."""

from typing import Any

import pytest

from lightning_cp.errors import ConfigError, ContextParallelError
from lightning_cp.topology import Coordinates, Size, Topology


@pytest.mark.parametrize(
    ("world", "local_world", "cp", "dp", "expected"),
    [
        (1, 1, "auto", "auto", (1, 1)),
        (8, 8, "auto", "auto", (1, 8)),
        (16, 8, "auto", "auto", (2, 8)),
        (6, 2, "auto", "auto", (3, 2)),
        (8, 8, 2, "auto", (4, 2)),
        (8, 8, 8, "auto", (1, 8)),
        (8, 8, 1, "auto", (8, 1)),
        (8, 8, "auto", 2, (2, 4)),
        (8, 8, "auto", 8, (8, 1)),
        (16, 8, "auto", 1, (1, 16)),
        (16, 8, 16, "auto", (1, 16)),
        (12, 4, 6, 2, (2, 6)),
        (3, 3, 3, 1, (1, 3)),
    ],
)
def test_resolve(
    world: int, local_world: int, cp: Size, dp: Size, expected: tuple[int, int]
) -> None:
    found = Topology.resolve(world=world, local_world=local_world, cp=cp, dp=dp)
    assert (found.dp, found.cp) == expected
    assert found.world == world


BAD_SIZES = [0, -1, True, False, 2.0, "two", None]


@pytest.mark.parametrize("size", BAD_SIZES)
@pytest.mark.parametrize(
    ("option", "other"),
    [("cp", {}), ("cp", {"dp": 2}), ("dp", {}), ("dp", {"cp": 2})],
)
def test_resolve_refuses_what_is_no_size(option: str, other: dict[str, int], size: object) -> None:
    name = {"cp": "context_parallel_size", "dp": "data_parallel_size"}[option]
    sizes: dict[str, Any] = {option: size, **other}
    with pytest.raises(ConfigError, match=rf"{name}={size!r}: .*integer of 1 or more, or 'auto'"):
        Topology.resolve(world=8, local_world=8, **sizes)


@pytest.mark.parametrize("size", BAD_SIZES)
@pytest.mark.parametrize("option", ["cp", "dp"])
def test_topology_refuses_what_is_no_size(option: str, size: object) -> None:
    sizes: dict[str, Any] = {"cp": 2, "dp": 2, option: size}
    with pytest.raises(ConfigError, match=rf"{size!r}: .*integer of 1 or more"):
        Topology(**sizes)


@pytest.mark.parametrize(
    ("world", "local_world", "sizes", "refused"),
    [
        (8, 8, {"cp": 3}, "context_parallel_size=3"),
        (8, 8, {"cp": 16}, "context_parallel_size=16"),
        (8, 8, {"dp": 16}, "data_parallel_size=16"),
        (8, 8, {"dp": 5}, "data_parallel_size=5"),
        (8, 8, {"cp": 3, "dp": 2}, "context_parallel_size=3"),
        (8, 3, {}, "context_parallel_size=3"),
    ],
)
def test_resolve_refuses_what_does_not_divide_the_world(
    world: int, local_world: int, sizes: dict[str, int], refused: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{refused} does not divide the 8 processes.*use one of \[1, 2, 4, 8\]"
    ):
        Topology.resolve(world=world, local_world=local_world, **sizes)


@pytest.mark.parametrize(("dp", "product"), [(1, 2), (3, 6), (8, 16)])
def test_resolve_refuses_a_product_that_is_not_the_world(dp: int, product: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"data_parallel_size={dp} x context_parallel_size=2 = {product} ranks, "
        r".*has 8.*with context_parallel_size=2 use data_parallel_size=4 or 'auto'",
    ):
        Topology.resolve(world=8, local_world=8, cp=2, dp=dp)


def test_config_error_is_a_value_error_of_the_package() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ContextParallelError)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 4), (4, 1), (3, 2), (2, 32)])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_ranks_and_groups_agree(dp: int, cp: int, tp: int, pp: int) -> None:
    topology = Topology(dp=dp, cp=cp, tp=tp, pp=pp)
    at = [topology.coordinates(rank) for rank in range(topology.world)]
    assert len(set(at)) == topology.world == dp * cp * tp * pp
    for axis, number in (("cp", 1), ("tp", 2), ("pp", 3)):
        groups = topology.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
        for group in groups:
            assert [at[rank][number] for rank in group] == list(range(getattr(topology, axis)))
            assert len({(*at[rank][:number], *at[rank][number + 1 :]) for rank in group}) == 1
    for group in topology.groups("dp_replicate", "dp_shard"):
        assert [at[rank].dp for rank in group] == list(range(dp))
        assert len({at[rank][1:] for rank in group}) == 1


def test_peers_are_neighbours() -> None:
    topology = Topology(dp=2, cp=3)
    assert topology.groups("cp") == ((0, 1, 2), (3, 4, 5))
    assert topology.coordinates(4) == Coordinates(dp=1, cp=1)
    shared = Topology(dp=1, cp=2, tp=2)
    assert shared.groups("tp") == ((0, 1), (2, 3))
    assert shared.groups("cp") == ((0, 2), (1, 3))
    assert shared.groups("cp", "tp") == ((0, 1, 2, 3),)


def test_replicas_are_groups_of_virtual_devices() -> None:
    topology = Topology(dp=4, cp=2, dp_replicate=2)
    assert topology.dp_shard == 2
    assert topology.groups("dp_shard", "cp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("dp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.coordinates(6) == Coordinates(dp=3, cp=0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp": 2}, (1, 4, 1)),
        ({"tp": 2, "cp": 2}, (2, 2, 1)),
        ({"tp": 4, "cp": 2}, (1, 2, 1)),
        ({"tp": 2, "cp": 2, "dp_replicate": 2}, (2, 2, 2)),
        ({"dp_replicate": 4, "dp": 4}, (4, 2, 4)),
        ({"tp": 8}, (1, 1, 1)),
    ],
)
def test_resolve_with_all_axes(sizes: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = Topology.resolve(world=8, local_world=8, **sizes)  # type: ignore[arg-type]
    assert (found.dp, found.cp, found.dp_replicate) == expected
    assert found.tp == sizes.get("tp", 1)
    assert found.world == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, r"tensor_parallel_size=3 does not divide the 8 processes.*\[1, 2, 4, 8\]"),
        ({"tp": 0}, "tensor_parallel_size=0: a size must be an integer of 1 or more$"),
        ({"tp": "auto"}, "tensor_parallel_size='auto': a size must be an integer of 1 or more$"),
        (
            {"tp": 2, "cp": 8},
            r"context_parallel_size=8 does not divide the 4 groups of 2 \(tensor_parallel_size\) "
            r".*use one of \[1, 2, 4\]",
        ),
        (
            {"tp": 2, "cp": 2, "dp": 4},
            "data_parallel_size=4 x context_parallel_size=2 x tensor_parallel_size=2 = 16 ranks, "
            "but the job has 8.*data_parallel_size=2 or 'auto'",
        ),
        (
            {"cp": 2, "dp_replicate": 3},
            r"data_parallel_replicate_size=3 does not divide data_parallel_size=4, .*\[1, 2, 4\]",
        ),
        ({"cp": 8, "dp_replicate": 2}, "data_parallel_replicate_size=2 does not divide .*size=1,"),
        ({"dp_replicate": True}, "data_parallel_replicate_size=True: a size must"),
    ],
)
def test_axes_that_do_not_fit(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.resolve(world=8, local_world=8, **sizes)
