"""Kernels on single tiles, the merge of partial results, and attention outside any context."""

from collections.abc import Callable
from itertools import pairwise, permutations
from math import isqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_cp import attend
from lightning_cp.attention import attention, attention_backward
from lightning_cp.context import HANDLES, SLOT, Context
from lightning_cp.errors import RefusedError
from lightning_cp.kernels import KERNELS, resolve
from lightning_cp.kernels.base import Saved
from lightning_cp.kernels.merge import merge_, state_dtype
from lightning_cp.kernels.reference import Reference
from lightning_cp.kernels.scores import Scores
from lightning_cp.layout import contiguous
from lightning_cp.mask import Mask
from lightning_cp.plan import Tile
from lightning_cp.plan.memory import NARROW, SMALL, slow_in_half
from lightning_cp.sequences import Sequence
from tests._harness import oracle, turns
from tests._harness.cases import DTYPES
from tests._harness.tolerance import assert_as_accurate

INFINITE = float("-inf")
Strides = Callable[[Tensor], Tensor]
OF_TILES = [name for name in KERNELS if name != "flex"]
"""Kernels that need no function of positions."""

STRIDES: dict[str, Strides] = {
    "contiguous": lambda x: x,
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head-size-first": lambda x: x.mT.contiguous().mT,
}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_TILES)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(("q_size", "k_size"), [(1, 1), (1, 9), (5, 5), (4, 11), (7, 8), (20, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("cuda_operators")
def test_tile(causal: bool, q_size: int, k_size: int, strides: str, name: str, dtype: str) -> None:
    if causal and q_size > k_size:
        q_size, k_size = k_size, q_size
    scale = 0.4
    shapes = [(2, 4, q_size, 3), (2, 2, k_size, 3), (2, 2, k_size, 3), (2, 4, q_size, 3)]
    q, k, v, grad = (
        STRIDES[strides](random(*shape, dtype=DTYPES[dtype], seed=seed))
        for seed, shape in enumerate(shapes)
    )
    tile = Tile((0, q_size), (0, k_size), causal)
    found = turns.run_tile(KERNELS[name], tile, (q, k, v, grad), scale)
    # Queries at the end of a square causal mask, or a full rectangle.
    before = [F.pad(x, (0, 0, k_size - q_size, 0)) for x in (q, grad)] if causal else [q, grad]
    mask = Mask(k_size, k_size) if causal else Mask.full(q_size, k_size)
    answer = oracle.attention(before[0], k, v, before[1], mask, scale=scale)
    baseline = oracle.single_device(before[0], k, v, before[1], mask, scale=scale)
    part = torch.arange(q_size) + (k_size - q_size if causal else 0)
    names = oracle.Answer._fields
    for item, got, truth, plain in zip(names, found, answer, baseline, strict=True):
        own = None if item in ("dk", "dv") else part
        assert got.dtype == (state_dtype(q.dtype) if item == "lse" else q.dtype)
        assert_as_accurate(got, truth, plain, where=item, part=own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_TILES)
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5), (24, 16)])
@pytest.mark.usefixtures("cuda_operators")
def test_keys_and_values_of_two_sizes(sizes: tuple[int, int], name: str, dtype: str) -> None:
    head, value = sizes
    shapes = [(2, 4, 7, head), (2, 2, 7, head), (2, 2, 7, value), (2, 4, 7, value)]
    q, k, v, grad = (
        random(*shape, dtype=DTYPES[dtype], seed=seed) for seed, shape in enumerate(shapes)
    )
    found = turns.run_tile(KERNELS[name], Tile((0, 7), (0, 7), True), (q, k, v, grad), 0.4)
    answer = oracle.attention(q, k, v, grad, Mask.causal(7), scale=0.4)
    baseline = oracle.single_device(q, k, v, grad, Mask.causal(7), scale=0.4)
    for item in oracle.Answer._fields:
        got, truth, plain = (getattr(x, item) for x in (found, answer, baseline))
        assert_as_accurate(got, truth, plain, where=item)


@pytest.mark.parametrize("name", ["cudnn", "efficient", "reference", "sdpa"])
def test_split_covers_a_tile_once(name: str) -> None:
    kernel = KERNELS[name]
    for tile in (
        Tile((3, 8), (2, 7), True, 1),
        Tile((3, 8), (2, 13), True, 1),
        Tile((3, 8), (2, 13), False, None),
    ):
        seen = torch.zeros(20, 20, dtype=torch.int64)
        for part in kernel.split(tile):
            (a, b), (c, d) = part.q, part.k
            assert part.row == tile.row
            ones = torch.ones(b - a, d - c, dtype=torch.int64)
            seen[a:b, c:d] += ones.tril(d - c - (b - a)) if part.causal else ones
        expected = torch.zeros(20, 20, dtype=torch.int64)
        (a, b), (c, d) = tile.q, tile.k
        ones = torch.ones(b - a, d - c, dtype=torch.int64)
        expected[a:b, c:d] = ones.tril(d - c - (b - a)) if tile.causal else ones
        assert torch.equal(seen, expected)


def test_split_makes_square_causal_blocks() -> None:
    for name in ("cudnn", "efficient", "sdpa"):
        parts = KERNELS[name].split(Tile((0, 4), (0, 10), True))
        assert parts == (Tile((0, 4), (0, 6), False), Tile((0, 4), (6, 10), True))
    assert KERNELS["reference"].split(Tile((0, 4), (0, 10), True)) == (Tile((0, 4), (0, 10), True),)


@pytest.mark.parametrize(
    ("size", "dtype"), [(isqrt(SMALL), torch.float32), (isqrt(SMALL) + 1, torch.bfloat16)]
)
def test_half_precision_backward_is_computed_in_float_where_small(
    size: int, dtype: torch.dtype
) -> None:
    """Around the bound both ways are as accurate as the fused kernel on its own."""
    q, k, v, grad = (random(1, 1, size, 8, dtype=torch.bfloat16, seed=i) for i in range(4))
    found = turns.run_tile(KERNELS["sdpa"], Tile((0, size), (0, size), True), (q, k, v, grad), 0.3)
    answer = oracle.attention(q, k, v, grad, Mask.causal(size), scale=0.3)
    baseline = oracle.single_device(q, k, v, grad, Mask.causal(size), scale=0.3)
    names = oracle.Answer._fields
    for name, got, truth, plain in zip(names, found, answer, baseline, strict=True):
        assert_as_accurate(got, truth, plain, where=name)
    rows = Saved(q, found.out, found.lse, grad)
    tile = Tile((0, size), (0, size), True)
    ((_, *parts),) = KERNELS["sdpa"].backward([tile], rows, k, v, scale=0.3)
    assert {x.dtype for x in parts} == {dtype}


def test_a_narrow_tile_is_small_however_long() -> None:
    assert slow_in_half(NARROW, 10**6)
    assert slow_in_half(10**6, 1)
    assert not slow_in_half(NARROW + 1, 10**6)


def partials(scores: Tensor, values: Tensor, edges: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Output and LSE over each block of keys; `scores` `[S, K]`, `values` `[K, D]`."""
    found = []
    for start, stop in pairwise(edges):
        block = scores[:, start:stop]
        lse = block.logsumexp(-1)
        shift = lse.masked_fill(lse == INFINITE, 0).unsqueeze(-1)
        found.append(((block - shift).exp() @ values[start:stop], lse))
    return found


def merged(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.zeros(parts[0][0].shape, dtype=dtype)
    lse = torch.full(parts[0][1].shape, INFINITE, dtype=dtype)
    for part in parts:
        merge_(out, lse, *part)
    return out, lse


score = st.one_of(st.floats(-5, 5), st.sampled_from([INFINITE, -1e4, -400.0, 0.0, 400.0, 1e4]))


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(st.lists(score, min_size=4, max_size=4), min_size=1, max_size=3),
    inner=st.lists(st.integers(0, 4), max_size=2).map(sorted),
)
def test_merge_is_exact_in_every_order(rows: list[list[float]], inner: list[int]) -> None:
    scores, values = torch.tensor(rows, dtype=torch.float64), random(4, 3)
    parts = partials(scores, values, [0, *inner, 4])
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == INFINITE, 0).unsqueeze(-1)).exp()
    for order in permutations(parts):
        out, total = merged(list(order), torch.float64)
        assert out.isfinite().all()
        assert torch.allclose(out, weights @ values, rtol=1e-11, atol=1e-11)
        assert torch.equal(total == INFINITE, lse == INFINITE)
        seen = lse != INFINITE
        assert torch.allclose(total[seen], lse[seen], rtol=1e-14, atol=1e-14)


def test_merge_of_nothing_stays_nothing() -> None:
    nothing = (torch.zeros(2, 3), torch.full((2,), INFINITE))
    out, lse = merged([nothing, nothing], torch.float32)
    assert not out.any()
    assert (lse == INFINITE).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merge_accumulates_half_precision_parts_in_float(dtype: torch.dtype) -> None:
    """Many equal parts: the running output must not drift as a half-precision sum would."""
    part = (torch.full((1, 1), 1 / 3).to(dtype), torch.zeros(1))
    out, lse = merged([part] * 64, torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    assert abs(out.item() - part[0].item()) < 1e-6
    assert abs(lse.item() - torch.tensor(64.0).log().item()) < 1e-5


def test_running_sums_are_float_or_double() -> None:
    assert {name: state_dtype(dtype) for name, dtype in DTYPES.items()} == {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.float32,
        "fp16": torch.float32,
    }


def test_resolve_says_why_a_kernel_cannot_run() -> None:
    q, v = torch.empty(1, 1, 2, 4), torch.empty(1, 1, 2, 3)
    assert resolve("auto", q, q) is KERNELS["sdpa"]
    assert resolve("reference", q, v) is KERNELS["reference"]
    assert resolve("sdpa", q, v) is KERNELS["sdpa"]
    for name in ("sdpa", "flash"):
        with pytest.raises(RefusedError, match=rf"{name} kernel .*attention_backend='reference'"):
            resolve(name, q, v, Scores(softcap=2.0))
    assert isinstance(resolve("auto", q, v, Scores(softcap=2.0)), Reference)
    meta = torch.empty(1, 1, 2, 4, device="meta")
    with pytest.raises(RefusedError, match="no path for meta tensors"):
        resolve("auto", meta, meta)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 3, 8), (2, 3, 3, 8), (2, 3, 3, 8)),  # 4 heads are no multiple of 3
        ((2, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)),
        ((2, 4, 3, 8), (2, 4, 3, 4), (2, 4, 3, 8)),
        ((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 5, 8)),
        ((2, 4, 3, 8), (2, 0, 3, 8), (2, 0, 3, 8)),
        ((4, 3, 8), (4, 3, 8), (4, 3, 8)),
    ],
)
def test_attend_refuses_shapes_that_do_not_fit(q: tuple, k: tuple, v: tuple) -> None:
    with pytest.raises(RefusedError, match="attention takes q"):
        attend(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_attend_refuses_mixed_dtypes() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RefusedError, match=r"of one dtype.*torch.float64"):
        attend(x, x.double(), x)


@pytest.mark.parametrize("keys", [((0, 3), (1, 4)), ((0, 3), (0, 3)), None])
def test_attend_refuses_other_rows_where_rows_are_padded_differently(keys: Any) -> None:
    sequence = Sequence(layout=contiguous(4, 1), length=4, batch=2, keys=keys)
    context = Context(
        rank=0, world=1, group=None, meta=None, sequences={"s": sequence}, exchange="ring"
    )
    x = random(4, 1, 4, 2)
    with SLOT.activate(context):
        attend(x[:2], x[:2], x[:2])
        if keys and keys[0] != keys[1]:
            with pytest.raises(RefusedError, match=r"call on 4 rows.*2 rows.*functional\.local"):
                attend(x, x, x)
        else:
            attend(x, x, x)


def test_a_context_outlives_the_handles_that_are_kept() -> None:
    sequence = Sequence(layout=contiguous(4, 1), length=4, batch=1)
    context = Context(
        rank=0, world=1, group=None, meta=None, sequences={"s": sequence}, exchange="ring"
    )
    x = random(1, 1, 4, 2)
    with SLOT.activate(context):
        before = attend(x, x, x)
        for _ in range(HANDLES):  # what as many losses do
            SLOT.keep(context)
        assert torch.equal(attend(x, x, x), before)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_outside_a_context_is_plain_attention(causal: bool) -> None:
    tensors = [random(2, h, 6, 4, seed=seed) for seed, h in enumerate((4, 2, 2, 4))]
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = attend(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3])
    answer = oracle.attention(*tensors, Mask(6, 6, causal))
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert_as_accurate(got.detach(), getattr(answer, name), None, where=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_passes_the_checks_of_torch(dtype: str) -> None:
    """Schema, fake implementation and autograd registration; autograd itself would cast."""
    q, k, v = (random(1, h, 4, 4, dtype=DTYPES[dtype], seed=h).requires_grad_() for h in (4, 2, 2))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention, (q, k, v, True, 0.5), test_utils=tests)
    *saved, handle = [x.detach() for x in (q, k, v, *attention(q, k, v, True, 0.5)[:3])]
    backward = (torch.ones_like(saved[3]), *saved, [handle], 0.5)
    torch.library.opcheck(
        attention_backward, backward, test_utils=("test_schema", "test_faketensor")
    )
    grads = attention_backward(*backward)
    assert [x.dtype for x in grads] == [DTYPES[dtype]] * 6


def test_fake_implementation_has_the_strides_of_the_real_one() -> None:
    q = random(2, 4, 5, 3)
    real = attention(q, q, q, True, 1.0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = attention(*(mode.from_tensor(q) for _ in range(3)), True, 1.0)
    assert real[3] == fake[3] == []
    for one, other in zip(real[:3], fake[:3], strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_schema_of_the_flash_kernel() -> None:
    """Private operators of torch; a failure here means that torch has moved."""
    first = "Tensor query, Tensor key, Tensor value, "
    last = "float dropout_p{}, bool is_causal{}, *, Tensor? attn_mask=None, float? scale=None) -> "
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert f"({first}{last.format('=0.', '=False')}" in str(forward._schema)
    assert f"(Tensor grad_out, {first}Tensor out, Tensor logsumexp, {last.format('', '')}" in str(
        backward._schema
    )
