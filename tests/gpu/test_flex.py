"""The kernel of flex attention on a GPU, against the reference in double."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_cp.attention import attend
from lightning_cp.context import SLOT
from tests._harness.asked import every_third
from tests._harness.cases import DTYPES
from tests._harness.multihead import context
from tests._harness.tolerance import assert_as_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _attended(kernel: str, dtype: torch.dtype, *, is_causal: bool, length: int) -> list[Tensor]:
    """Output and gradients of a call over one row per batch."""
    generator = torch.Generator().manual_seed(length)
    leaves = [
        torch.randn(2, heads, length, 64, generator=generator)
        .to(torch.bfloat16)
        .to("cuda", dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]
    with SLOT.activate(None):
        own = context(size=length)
        sequence = replace(own.sequences["s"], length=length)
        with SLOT.activate(replace(own, kernel=kernel, sequences={"s": sequence})):
            out = attend(*leaves, is_causal=is_causal, mask_mod=every_third)
            grads = torch.autograd.grad(out.float().sin().sum(), leaves)
    return [x.detach().cpu() for x in (out, *grads)]


@pytest.mark.parametrize("length", [37, 389, 4500])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_flex(dtype: str, is_causal: bool, length: int) -> None:
    truth = _attended("reference", torch.float64, is_causal=is_causal, length=length)
    plain = _attended("reference", DTYPES[dtype], is_causal=is_causal, length=length)
    found = _attended("flex", DTYPES[dtype], is_causal=is_causal, length=length)
    for name, *three in zip(("out", "dq", "dk", "dv"), found, truth, plain, strict=True):
        assert_as_accurate(*three, where=name)
