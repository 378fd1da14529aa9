"""Groups of roles, without processes: which are urgent, and in which order they are made."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cp.mesh import CTAS, build_mesh
from lightning_cp.topology import Topology

AWAITED = timedelta(seconds=77)


class Options:
    """Stands for `ProcessGroupNCCL.Options`, which builds for CPUs lack."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every group that is asked for, of rank 2."""
    found: list[tuple[Any, ...]] = []

    def new_group(*args: Any, group_desc: str) -> Any:
        found.append((*args, group_desc))
        return tuple(args[0])

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    return found


def test_messages_of_attention_are_urgent_on_cuda(made: list[tuple[Any, ...]]) -> None:
    mesh = build_mesh(Topology(dp=2, cp=2), device=torch.device("cuda"), timeout=AWAITED)
    urgent = [args for args in made if args[3] is not None]
    assert [args[0] for args in urgent] == [[0, 1], [2, 3]] * 2  # cp, then cp_a2a
    for _, timeout, backend, options, _ in urgent:
        assert (timeout, backend) == (AWAITED, None)
        assert options.is_high_priority_stream
        assert options.config.max_ctas == CTAS
        assert options._timeout == AWAITED
    assert mesh.cp == mesh.cp_a2a == (2, 3)
    assert mesh.dp == (0, 2)
    assert [args[4] for args in made] == [
        *(f"lightning_cp:{role}" for role in ("cp", "cp", "meta", "meta")),
        *(f"lightning_cp:{role}" for role in ("cp_a2a", "cp_a2a", "grad", "dp", "dp")),
    ]


def test_other_devices_have_no_such_options(made: list[tuple[Any, ...]]) -> None:
    build_mesh(Topology(dp=2, cp=2), device=torch.device("cpu"))
    assert all(options is None for *_, options, _ in made)
