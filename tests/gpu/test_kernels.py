"""CUDA kernels on a GPU: every rank's plan in turn on one device, against attention in double."""

from importlib.util import find_spec
from itertools import product

import pytest
import torch

from lightning_cp.kernels import KERNELS, Kernel, resolve
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES, Tile
from tests._harness import oracle, turns
from tests._harness.cases import DTYPES
from tests._harness.tolerance import assert_as_accurate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 389
NEEDS_PACKAGE = pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn")
NEEDS_VERSION_3 = pytest.mark.skipif(
    find_spec("flash_attn_interface") is None, reason="needs flash-attn 3"
)
NEEDS_VERSION_4 = pytest.mark.skipif(
    find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None,
    reason="needs flash-attn 4",
)
CELLS = [
    ("flash", "bf16"),
    ("flash", "fp16"),
    pytest.param("flash_attn", "bf16", marks=NEEDS_PACKAGE),
    pytest.param("flash_attn_3", "bf16", marks=NEEDS_VERSION_3),
    pytest.param("flash_attn_4", "bf16", marks=NEEDS_VERSION_4),
    ("efficient", "fp32"),
    ("efficient", "bf16"),
    ("cudnn", "bf16"),
    ("cudnn", "fp16"),
    ("reference", "fp32"),
    ("reference", "fp64"),
]
MASKS = {
    "causal": Mask.causal(LENGTH),
    "full": Mask.full(LENGTH),
    "documents": Mask(LENGTH, LENGTH, True, (0, 1, 90, 91, 91, 300, LENGTH)),
    "documents per row": Mask(LENGTH, LENGTH, True, ((0, 150, LENGTH), (0, 1, 17, LENGTH))),
    "padding": Mask(LENGTH, LENGTH, False, keys=((0, 300), (40, LENGTH))),
    "window": Mask(LENGTH, LENGTH, window=(40, None)),
    "window full": Mask(LENGTH, LENGTH, False, (0, 200, LENGTH), window=(17, 80)),
}


@pytest.mark.parametrize(
    ("world", "exchange"),
    [(1, "ring"), *((2, name) for name in SCHEDULES), (4, "ring"), (4, "hybrid")],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_group(name: str, dtype: str, mask: str, exchange: str, world: int) -> None:
    layout = {1: "contiguous", 2: "zigzag", 4: "uneven"}[world]
    group = turns.group(world, exchange, layout, MASKS[mask])
    inputs = turns.tensors(LENGTH, heads=(4, 2), head_dims=(64, 64), dtype=DTYPES[dtype])
    turns.assert_right(group, KERNELS[name], inputs, "cuda")


@pytest.mark.parametrize(
    ("size", "heads"), [(8, (4, 4)), (20, (6, 3)), (64, (4, 1)), (100, (4, 4)), (128, (8, 2))]
)
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_heads(name: str, dtype: str, size: int, heads: tuple[int, int]) -> None:
    group = turns.group(2, "ring", "zigzag", MASKS["window full"])
    inputs = turns.tensors(LENGTH, heads=heads, head_dims=(size, size), dtype=DTYPES[dtype])
    turns.assert_right(group, KERNELS[name], inputs, "cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_sizes_of_tiles(name: str, dtype: str, causal: bool) -> None:
    """One tile of every size around the blocks of the kernels, forward and backward."""
    for q_size, k_size in product((1, 2, 31, 32, 33, 200), repeat=2):
        if q_size <= k_size or not causal:
            mask = Mask(k_size, k_size) if causal else Mask.full(q_size, k_size)
            inputs = turns.tensors(200, head_dims=(64, 64), dtype=DTYPES[dtype])
            first = k_size - q_size if causal else 0
            check_tile(KERNELS[name], mask, first, inputs)


def check_tile(kernel: Kernel, mask: Mask, first: int, inputs: turns.Inputs) -> None:
    """The queries of a mask from `first` on, as one tile."""
    length, k_size = mask.q_length, mask.kv_length
    whole_q, whole_grad = (inputs[i][:, :, :length] for i in (0, 3))
    k, v = (inputs[i][:, :, :k_size] for i in (1, 2))
    grad = torch.cat([torch.zeros_like(whole_grad[:, :, :first]), whole_grad[:, :, first:]], 2)
    whole = (whole_q, k, v, grad)
    truth = oracle.attention(*whole, mask, scale=0.125)
    plain = oracle.single_device(*whole, mask, scale=0.125)
    tile = Tile((0, length - first), (0, k_size), mask.is_causal)
    q, grad = (x[:, :, first:].cuda() for x in (whole_q, grad))
    found = turns.run_tile(kernel, tile, (q, k.cuda(), v.cuda(), grad), 0.125)
    rows = torch.arange(first, length)
    # Over a single key dq and dk are 0, and what is left of terms that cancel says nothing.
    names = oracle.Answer._fields if k_size > 1 else ("out", "lse", "dv")
    for name in names:
        part = None if name in ("dk", "dv") else rows
        got, baseline = getattr(found, name).cpu(), getattr(plain, name)
        where = f"{name} of {tile}"
        assert_as_accurate(got, getattr(truth, name), baseline, where=where, part=part)


@pytest.mark.parametrize(
    ("dtype", "chosen"), [("bf16", "flash"), ("fp16", "flash"), ("fp32", "efficient")]
)
def test_auto(dtype: str, chosen: str) -> None:
    q = torch.zeros(1, 1, 2, 64, dtype=DTYPES[dtype], device="cuda")
    assert resolve("auto", q, q) is KERNELS[chosen]
