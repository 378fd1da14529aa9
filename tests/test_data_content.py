"""Telling batches apart: a hash of their contents, and their shapes in words."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lightning_cp.data.content import content_code, shapes_of
from tests._harness.cuts import tokens

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_content_code_sees_every_element_and_the_order(dtype: torch.dtype) -> None:
    base = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    code = content_code({"x": base})
    assert code == content_code({"x": base.clone()})
    assert code == content_code({"x": base.mT.contiguous().mT}), "strides do not matter"
    assert 0 <= code < 2**32
    seen = {code}
    for index in range(base.numel()):
        other = base.clone()
        other.view(-1)[index] = base.logical_not().view(-1)[index]
        seen.add(content_code({"x": other}))
    assert len(seen) == base.numel() + 1
    assert content_code({"x": base.flip(-1)}) != code
    assert content_code({"x": base.flip(0)}) == content_code({"x": base.flip(0).clone()})


def test_content_code_of_whole_batches() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    base = content_code({"x": x, "y": y})
    assert base == content_code({"x": x, "y": y, "name": "anything"})
    different: list[Mapping[str, Tensor] | tuple[Tensor, ...]] = [
        {"x": y, "y": x},
        {"x": x, "z": y},
        {"x": x},
        {"x": x, "y": y + 2**-22},
        {"x": x, "y": -y},
        (x, y),
    ]
    codes = [base, *map(content_code, different), content_code((y, x))]
    assert len(set(codes)) == len(codes)
    assert content_code({"x": torch.tensor(0.0)}) != content_code({"x": torch.tensor(-0.0)})
    nan = torch.tensor([float("nan")])
    assert content_code({"x": nan}) == content_code({"x": nan.clone()})
    assert content_code({"x": torch.zeros(0)}) == content_code({"x": torch.zeros(0)})


def test_shapes_are_readable() -> None:
    batch = {"input_ids": tokens(), "name": "x", "style": torch.zeros(2)}
    assert shapes_of(batch) == "input_ids (2, 8) torch.int64, style (2,) torch.float32"
    assert shapes_of(tokens()) == "tensor (2, 8) torch.int64"
    assert shapes_of((torch.zeros(1),)) == "0 (1,) torch.float32"
