"""Which kernel a call on CUDA gets, and what is said where none fits; without a GPU."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightning_cp.errors import RefusedError
from lightning_cp.kernels import KERNELS, choose, resolve
from lightning_cp.kernels.flash_attn import FlashAttn
from lightning_cp.kernels.flex import Flex
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.scores import Scores
from tests._harness import flash_attn
from tests._harness.asked import every_third


def fake(dtype: torch.dtype, size: int, value: int | None = None) -> tuple[Tensor, Tensor]:
    with FakeTensorMode():
        q = torch.empty(1, 1, 2, size, device="cuda", dtype=dtype)
        return q, torch.empty(1, 1, 2, value or size, device="cuda", dtype=dtype)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the device and the build are capable of."""

    def of(major: int, built: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 5))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: built)

    return of


@pytest.mark.parametrize(
    ("name", "dtype", "size", "chosen"),
    [
        ("auto", torch.bfloat16, 64, "flash"),
        ("sdpa", torch.float16, 256, "flash"),
        ("auto", torch.float32, 64, "efficient"),
        ("auto", torch.bfloat16, 512, "efficient"),
        ("cudnn", torch.bfloat16, 128, "cudnn"),
        ("efficient", torch.float16, 64, "efficient"),
        ("reference", torch.float64, 64, "reference"),
    ],
)
def test_resolve_on_cuda(device: Any, name: str, dtype: torch.dtype, size: int, chosen: str):
    device(8)
    assert resolve(name, *fake(dtype, size)) is KERNELS[chosen]


def test_resolve_with_flash_attn(device: Any) -> None:
    capped = Scores(softcap=3.0)
    with flash_attn.installed():
        device(8)
        assert resolve("auto", *fake(torch.bfloat16, 64)) is KERNELS["flash"]
        assert type(resolve("auto", *fake(torch.bfloat16, 64), capped)) is FlashAttn
        device(8, built=False)
        assert resolve("auto", *fake(torch.bfloat16, 64)) is KERNELS["flash_attn"]
        assert resolve("sdpa", *fake(torch.bfloat16, 64)) is KERNELS["efficient"]
    with pytest.raises(RefusedError, match="which is not installed"):
        resolve("flash_attn", *fake(torch.bfloat16, 64))


def test_resolve_with_a_mask_function(device: Any) -> None:
    """Flex attention for the function alone, the reference beside other terms and elsewhere."""
    hiding, more = Scores(mask_mod=every_third), Scores(mask_mod=every_third, softcap=1.0)
    device(8)
    for dtype in (torch.bfloat16, torch.float32):
        assert type(resolve("auto", *fake(dtype, 64), hiding)) is Flex
    assert type(resolve("auto", *fake(torch.bfloat16, 64), more)) is Reference
    assert type(resolve("auto", *fake(torch.bfloat16, 8), hiding)) is Reference
    for q, reason in (
        (fake(torch.float64, 64), r"takes .*float32, got torch.float64"),
        (fake(torch.bfloat16, 8), r"takes heads of at least 16, got 8"),
        ((torch.zeros(1, 1, 2, 16),) * 2, r"runs on CUDA devices, not on cpu tensors"),
    ):
        assert re.search(f"the flex kernel {reason}", choose("auto", *q, hiding).passed[-1])
    with pytest.raises(RefusedError, match="the flex kernel is for calls with a mask_mod"):
        resolve("flex", *fake(torch.bfloat16, 64))


def test_resolve_on_older_devices(device: Any) -> None:
    device(7)
    assert resolve("auto", *fake(torch.float16, 64)) is KERNELS["efficient"]
    with pytest.raises(RefusedError) as error:
        resolve("auto", *fake(torch.bfloat16, 64))
    assert str(error.value) == (
        "attention_backend='auto': the sdpa kernel has no path for cuda tensors; the flash kernel "
        "needs compute capability 8.0, this device has 7.5; the flash_attn kernel needs the "
        "package flash-attn, from 2.7 on, which is not installed; the efficient kernel needs "
        "compute capability 8.0, this device has 7.5; attention_backend='reference' computes "
        "anything, slowly"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "size", "message"),
    [
        ("auto", torch.float64, 64, r"efficient kernel takes .*float32.*, got torch.float64"),
        ("flash", torch.float32, 64, r"flash kernel takes torch.float16 and torch.bfloat16, got"),
        ("flash", torch.bfloat16, 264, r"heads of at most 256, got 264"),
        ("cudnn", torch.bfloat16, 136, r"heads of at most 128, got 136"),
    ],
)
def test_resolve_says_what_does_not_fit(
    device: Any, name: str, dtype: Any, size: int, message: str
):
    device(9)
    with pytest.raises(RefusedError, match=message):
        resolve(name, *fake(dtype, size))


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_resolve_knows_builds_without_a_kernel(device: Any, name: str) -> None:
    device(9, built=False)
    with pytest.raises(RefusedError, match=f"the {name} kernel is not part of this build"):
        resolve(name, *fake(torch.bfloat16, 64))


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_resolve_refuses_other_devices(name: str) -> None:
    with pytest.raises(RefusedError, match=f"{name} kernel runs on CUDA devices, not on cpu"):
        resolve(name, torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))


def test_values_of_other_sizes_go_through_on_cuda(device: Any) -> None:
    device(9)
    assert resolve("auto", *fake(torch.bfloat16, 192, 128)) is KERNELS["flash"]
