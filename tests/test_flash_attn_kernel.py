"""The kernel of flash-attn in calls of attention, by the stand-in on CPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.attention import attend
from lightning_cp.context import SLOT
from lightning_cp.kernels import KERNELS
from lightning_cp.swap import Installation
from tests._harness import flash_attn, flash_attn_3_ops, flash_attn_4_functions
from tests._harness.multihead import context


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel take CPU tensors of any dtype."""
    for name in ("flash_attn.unfit", "flash_attn.too_old"):
        monkeypatch.setattr(f"lightning_cp.kernels.{name}", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def _attended(kernel: str, size: int, **options: Any) -> list[Tensor]:
    """Output and gradients of a call in a context."""
    generator = torch.Generator().manual_seed(size)
    rows = [
        torch.randn(2, heads, 5, size, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]
    leaves = [x.requires_grad_() for x in rows]
    with SLOT.activate(replace(context(), kernel=kernel)):
        out = attend(*leaves, **options)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("installed", [False, True], ids=["plain", "with overrides"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_calls_like_those_of_the_reference(
    window: Any, softcap: float | None, installed: bool
) -> None:
    """The kernel's own calls are not taken for a model's, where those are swapped."""
    options = {"is_causal": window is None, "softcap": softcap, "window": window}
    with flash_attn.installed():
        installation = Installation() if installed else None
        try:
            for size in (5, 8):
                found = _attended("flash_attn", size, **options)
                for one, other in zip(found, _attended("reference", size, **options), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        finally:
            if installation is not None:
                installation.remove()
        names = {call.name for call in flash_attn.CALLS}
        assert names == {"_flash_attn_varlen_forward", "_flash_attn_varlen_backward"}


LATER = {
    "flash_attn_3": (flash_attn_3_ops, set(flash_attn_3_ops.SCHEMAS)),
    "flash_attn_4": (flash_attn_4_functions, set(flash_attn_4_functions.SIGNATURES)),
}
"""Stand-ins by kernel, and the names of what it must call."""


@pytest.mark.parametrize("kernel", LATER)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, (2, 1), (2, None)])
def test_later_versions(window: Any, softcap: float | None, kernel: str) -> None:
    options = {"is_causal": window is None, "softcap": softcap, "window": window}
    standin, names = LATER[kernel]
    with standin.installed():
        for size in (5, 8):
            found = _attended(kernel, size, **options)
            for one, other in zip(found, _attended("reference", size, **options), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert set(standin.CALLS) == names


def test_version_3_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 2, 8)
    kernel = KERNELS["flash_attn_3"]
    assert "not installed" in str(kernel.rejects(q, q))
    with flash_attn_3_ops.installed():
        assert kernel.rejects(q, q) is None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        assert kernel.rejects(q, q) == "needs compute capability 9.x, this device has 10.0"
    large = torch.zeros(1, 1, 2, 264)
    assert kernel.rejects(large, large) == "takes heads of at most 256, got 264"


def test_version_4_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kernel = torch.zeros(1, 1, 2, 8), KERNELS["flash_attn_4"]
    wide = torch.zeros(1, 1, 2, 160)
    assert "flash-attn 4, which is not installed" in str(kernel.rejects(q, q))
    with flash_attn_4_functions.installed():
        assert kernel.rejects(q, q) is kernel.rejects(wide, wide) is None
        for found in ((10, 0), (11, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=found: found)
            assert kernel.rejects(q, q) is None
            reason = f"takes heads of at most 128 on devices of {found[0]}.x, got 160"
            assert kernel.rejects(wide, wide) == reason
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        needed = "needs compute capability 9.x to 11.x, this device has 8.0"
        assert kernel.rejects(q, q) == needed


def test_a_version_4_with_other_arguments() -> None:
    q, kernel = torch.zeros(1, 1, 2, 8), KERNELS["flash_attn_4"]
    last = flash_attn_4_functions.SIGNATURES
    for older in ("(q, k, v, grad, lse)", last["_flash_attn_bwd"].replace("dlse=None, ", "")):
        with flash_attn_4_functions.installed(last | {"_flash_attn_bwd": older}):
            assert "or another version of it" in str(kernel.rejects(q, q))


@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_gradients_where_torch_is_told_so(wanted: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        with flash_attn.installed():
            _attended("flash_attn", 8)
            assert flash_attn.CALLS[-1].arguments["deterministic"] is wanted
    finally:
        torch.use_deterministic_algorithms(before)
