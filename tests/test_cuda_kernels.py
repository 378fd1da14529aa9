"""CUDA kernels without a GPU: the operators they call, and all that happens around the calls."""

import inspect
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cp.kernels import KERNELS
from lightning_cp.kernels.base import Gradients, Part, Saved
from lightning_cp.kernels.cuda import aligned
from lightning_cp.kernels.flash import Flash
from lightning_cp.kernels.packing import CAUSAL, FULL, packs, runs, window
from lightning_cp.kernels.visible import visible
from lightning_cp.mask import Mask
from lightning_cp.plan import SCHEDULES, Tile
from tests._harness import cuda_ops, turns
from tests._harness.cases import DTYPES

DEFAULTS: dict[str, dict[str, Any]] = {
    "_flash_attention_forward": {
        "scale": None,
        "window_size_left": None,
        "window_size_right": None,
    },
    "_flash_attention_backward": {
        "scale": None,
        "window_size_left": None,
        "window_size_right": None,
    },
    "_scaled_dot_product_efficient_attention": {
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
    },
    "_scaled_dot_product_efficient_attention_backward": {"is_causal": False, "scale": None},
    "_scaled_dot_product_cudnn_attention": {
        "dropout_p": 0.0,
        "is_causal": False,
        "return_debug_mask": False,
        "scale": None,
    },
    "_scaled_dot_product_cudnn_attention_backward": {"scale": None},
}
RETURNS = {
    "_flash_attention_forward": 5,
    "_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention": 4,
    "_scaled_dot_product_efficient_attention_backward": 4,
    "_scaled_dot_product_cudnn_attention": 9,
    "_scaled_dot_product_cudnn_attention_backward": 3,
}


@pytest.mark.parametrize("name", cuda_ops.OPERATORS)
def test_schema_of_operator(name: str) -> None:
    """Private operators of torch; a failure here means that torch has moved.

    The implementations of the tests name the arguments; torch may have more, if optional.
    """
    schema = getattr(torch.ops.aten, name).default._schema
    ours = inspect.signature(cuda_ops.OPERATORS[name]).parameters.values()
    expected = [x.name for x in ours if x.kind is not inspect.Parameter.VAR_KEYWORD]
    theirs = {argument.name: argument for argument in schema.arguments}
    assert list(theirs)[: len(expected)] == expected
    assert all(theirs[x].default_value is None for x in list(theirs)[len(expected) :])
    assert all(theirs[x].has_default_value() for x in list(theirs)[len(expected) :])
    for parameter in ours:
        if parameter.name in theirs:
            keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert theirs[parameter.name].kwarg_only == keyword
    given_defaults = {x: a.default_value for x, a in theirs.items() if a.has_default_value()}
    assert {x: given_defaults[x] for x in expected if x in given_defaults} == DEFAULTS[name]
    assert len(schema.returns) == RETURNS[name]


def test_results_of_operators_are_where_they_are_expected() -> None:
    names = {
        "_flash_attention_forward": ["output", "softmax_logsumexp", "rng_state", "unused"],
        "_scaled_dot_product_efficient_attention": ["output", "log_sumexp"],
        "_scaled_dot_product_cudnn_attention": ["output", "logsumexp"],
    }
    for name, expected in names.items():
        returns = getattr(torch.ops.aten, name).default._schema.returns
        assert [x.name for x in returns][: len(expected)] == expected


TILES = [
    Tile((0, 4), (0, 4), True),
    Tile((4, 9), (4, 11), True),
    Tile((9, 12), (0, 5)),
    Tile((12, 16), (3, 9), band=(-1, 3)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash"])
def test_shapes_by_the_functions_of_torch(name: str, dtype: torch.dtype) -> None:
    """Torch's own shape functions of the operators take our calls and give what we expect."""
    kernel = Flash() if name == "flash" else KERNELS[name]
    q, out, grad = (torch.empty(2, 4, 16, 12, device="meta", dtype=dtype) for _ in range(3))
    k, v = (torch.empty(2, 2, 12, 12, device="meta", dtype=dtype) for _ in range(2))
    lse = torch.empty(2, 4, 16, device="meta")
    for part in kernel.forward(TILES, q, k, v, scale=0.3):
        n = part.tile.q[1] - part.tile.q[0]
        assert (part.out.shape, part.out.dtype) == ((2, 4, n, 12), dtype)
        assert (part.lse.shape, part.lse.dtype) == ((2, 4, n), torch.float32)
    for tile, *grads in kernel.backward(TILES, Saved(q, out, lse, grad), k, v, scale=0.3):
        sizes = [(4, tile.q), (2, tile.k), (2, tile.k)]
        for x, (heads, (start, stop)) in zip(grads, sizes, strict=True):
            assert x.shape == (2, heads, stop - start, 12)
            assert x.dtype in (dtype, torch.float32)


@pytest.mark.parametrize(
    ("size", "head", "copied"), [(8, 8, False), (8, 5, True), (16, 8, True), (16, 16, False)]
)
def test_aligned_copies_only_what_it_must(size: int, head: int, copied: bool) -> None:
    x = torch.randn(2, 3, 4, head)
    got = aligned(x, size)
    assert torch.equal(got[..., :head], x)
    assert not got[..., head:].any()
    assert (got.data_ptr() != x.data_ptr()) == copied


@pytest.mark.parametrize("kind", ["offset", "row", "last", "expanded"])
def test_aligned_copies_odd_strides(kind: str) -> None:
    x = {
        "offset": torch.randn(65)[1:].view(1, 2, 4, 8),
        "row": torch.randn(1, 2, 4, 9)[..., :8],
        "last": torch.randn(1, 2, 8, 4).mT,
        "expanded": torch.randn(1, 2, 4, 1).expand(-1, -1, -1, 8),
    }[kind]
    got = aligned(x, 8)
    assert torch.equal(got, x)
    assert got.is_contiguous()
    assert got.storage_offset() == 0


@st.composite
def banded(draw: st.DrawFn) -> Tile:
    """A tile with a band in which every row sees a key and every key is seen."""
    n, m = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    low = draw(st.integers(1 - n, min(0, m - n)))
    high = draw(st.integers(max(0, m - n), m - 1))
    return Tile((3, 3 + n), (1, 1 + m), band=(low, high))


@st.composite
def plain(draw: st.DrawFn) -> Tile:
    n = draw(st.integers(1, 9))
    m = draw(st.integers(n, 12))
    return Tile((0, n), (0, m), causal=draw(st.booleans()))


@settings(deadline=None, max_examples=300)
@given(tiles=st.lists(banded() | plain(), min_size=1, max_size=5))
def test_windows_show_what_tiles_show(tiles: list[Tile]) -> None:
    """By what the CUDA kernel makes of the window of a call, of any tiles that go together."""
    q, k = torch.zeros(1, 1, 12, 8), torch.zeros(1, 1, 12, 8)
    for pack in packs(tiles):
        call = Flash()._call(pack, q, k)
        for tile in pack.tiles:
            n, m = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
            assert n <= call.max_q
            assert m <= call.max_k
            bias = cuda_ops._window_bias(n, m, call.max_k, call.causal, call.left, call.right)
            seen = visible(tile, q.device)
            expected = torch.ones(n, m, dtype=torch.bool) if seen is None else seen
            assert torch.equal(bias == 0, expected), (tile, call)


def test_a_window_as_wide_as_the_keys_needs_a_larger_bound() -> None:
    """The fault that `max_k` guards against: bounded by its own 3 keys the tile would be full."""
    tile = Tile((0, 10), (0, 3), band=(-7, 0))
    assert window(tile) == (0, 7)
    seen = visible(tile, torch.device("cpu"))
    assert seen is not None
    assert not torch.equal(cuda_ops._window_bias(10, 3, 3, False, 0, 7) == 0, seen)
    assert torch.equal(cuda_ops._window_bias(10, 3, 10, False, 0, 7) == 0, seen)


def test_tiles_go_together_by_window() -> None:
    tiles = [
        Tile((4, 8), (4, 8), True),
        Tile((0, 4), (0, 4), True),
        Tile((0, 4), (4, 9)),
        Tile((8, 9), (0, 4), True),
        Tile((0, 4), (0, 4), band=(-3, 0)),
        Tile((0, 4), (0, 4), band=(-1, 0)),
        Tile((0, 3), (0, 5), band=(1, 2)),
        Tile((0, 4), (0, 4), True, row=1),
    ]
    found = {(pack.window, pack.shared): pack.tiles for pack in packs(tiles)}
    assert found == {
        (CAUSAL, True): (tiles[1], tiles[4], tiles[0], tiles[3]),
        (FULL, True): (tiles[2],),
        ((1, 0), True): (tiles[6], tiles[5]),
        (CAUSAL, False): (tiles[7],),
    }
    assert packs([tiles[3]])[0].window == FULL
    assert [pack.tiles for pack in packs([tiles[0], tiles[3]])] == [(tiles[0], tiles[3])]


def test_neighbours_are_joined() -> None:
    tiles = [
        Tile((0, 4), (0, 4)),
        Tile((4, 6), (5, 8)),
        Tile((6, 7), (8, 9)),
        Tile((8, 9), (9, 10)),
    ]
    by_rows = list(runs(tiles, keys=False))
    assert [(t.q, t.k) for t in by_rows] == [((0, 7), (0, 9)), ((8, 9), (9, 10))]
    both = list(runs(tiles, keys=True))
    assert [(t.q, t.k) for t in both] == [((0, 4), (0, 4)), ((4, 7), (5, 9)), ((8, 9), (9, 10))]
    rows = [Tile((0, 4), (0, 4), row=0), Tile((4, 6), (4, 6), row=1)]
    assert list(runs(rows, keys=True)) == rows
    assert list(runs([], keys=True)) == []


Q = torch.randn(2, 4, 16, 8, dtype=torch.float64)
KV = torch.randn(2, 2, 16, 8, dtype=torch.float64)
DOCUMENTS = [Tile((a, b), (a, b), True) for a, b in pairwise((0, 5, 6, 11, 16))]


class Made(NamedTuple):
    """What a kernel gave, and the calls of its operators."""

    parts: list[Part]
    grads: list[Gradients]
    forward: list[cuda_ops.Call]
    backward: list[cuda_ops.Call]


@pytest.fixture
def made(cuda_operators: list[cuda_ops.Call]) -> Any:
    """Runs the flash kernel forward and backward on some tiles."""

    def run(kernel: Flash, tiles: list[Tile], q: Tensor, kv: Tensor) -> Made:
        cuda_operators.clear()
        parts = list(kernel.forward(tiles, q, kv, kv, scale=0.3))
        middle = len(cuda_operators)
        lse = torch.zeros(q.shape[:3], dtype=q.dtype)
        grads = list(kernel.backward(tiles, Saved(q, q, lse, q), kv, kv, scale=0.3))
        return Made(parts, grads, cuda_operators[:middle], cuda_operators[middle:])

    return run


def test_documents_are_one_call_and_one_part(made: Any) -> None:
    found = made(Flash(), DOCUMENTS, Q[:1], KV[:1])
    assert [len(x) for x in found] == [1, 1, 1, 1]
    assert found.parts[0].tile == found.grads[0].tile == Tile((0, 16), (0, 16))
    for (_, args, _), first in ((found.forward[0], 3), (found.backward[0], 6)):
        assert args[first].tolist() == args[first + 1].tolist() == [0, 5, 6, 11, 16]
        assert args[first + 2 : first + 6] == (5, 5, 0.0, True)
    args = found.forward[0].args
    assert args[0].data_ptr() == Q.data_ptr()  # nothing was copied
    assert args[1].data_ptr() == KV.data_ptr()


def test_batch_rows_are_further_sequences(made: Any) -> None:
    found = made(Flash(), DOCUMENTS, Q, KV)
    assert found.forward[0].args[3].tolist() == [0, 5, 6, 11, 16, 21, 22, 27, 32]
    (part,), (grad,) = found.parts, found.grads
    assert part.tile.row is None
    assert part.out.shape == Q.shape
    assert grad.dk.shape == KV.shape


def test_token_major_rows_are_not_copied(made: Any) -> None:
    q, kv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, KV))
    found = made(Flash(), DOCUMENTS, q, kv)
    for x, place in ((q, 0), (kv, 1)):
        assert found.forward[0].args[place].data_ptr() == x.data_ptr()
        assert found.backward[0].args[place + 1].data_ptr() == x.data_ptr()


def test_scattered_rows_are_gathered(made: Any) -> None:
    tiles = [Tile((0, 4), (2, 6), row=1), Tile((8, 12), (8, 12), row=0)]
    found = made(Flash(), tiles, Q, KV)
    rows = torch.cat([Q[0, :, 8:12], Q[1, :, :4]], 1).transpose(0, 1)
    keys = torch.cat([KV[0, :, 8:12], KV[1, :, 2:6]], 1).transpose(0, 1)
    assert torch.equal(found.forward[0].args[0], rows)
    assert torch.equal(found.forward[0].args[1], keys)
    assert [part.tile for part in found.parts] == [tiles[1], tiles[0]]
    assert all(part.out.shape == (1, 4, 4, 8) for part in found.parts)


def test_windows_are_told_only_where_there_are_some(made: Any) -> None:
    """A build that knows causality by its flag alone gets no window with it."""
    tiles = [Tile((0, 4), (0, 4), True), Tile((0, 4), (4, 9)), Tile((0, 8), (0, 8), band=(-2, 1))]
    found = made(Flash(), tiles, Q, KV)
    names = "window_size_left", "window_size_right"
    for calls, causal in ((found.forward, 8), (found.backward, 11)):
        told = {(c.args[causal], *(c.kwargs.get(name) for name in names)) for c in calls}
        assert told == {(True, None, None), (False, None, None), (False, 2, 1)}


def test_lengths_stay_on_the_device(made: Any) -> None:
    """Every layer of a step has the same tiles; their lengths are sent once."""
    kernel = Flash()
    first, again = (made(kernel, DOCUMENTS, Q, KV).forward[0].args for _ in range(2))
    assert first[3].data_ptr() == again[3].data_ptr() == first[4].data_ptr()


def test_nothing_to_do_calls_nothing(made: Any) -> None:
    assert made(Flash(), [], Q, KV) == ([], [], [], [])


NAMES = ["flash", "flash_attn", "efficient", "cudnn"]
MASKS = {
    "causal": Mask.causal(23),
    "full": Mask.full(23),
    "documents": Mask(23, 23, True, (0, 1, 4, 9, 9, 23)),
    "documents per row": Mask(23, 23, True, ((0, 5, 23), (0, 1, 17, 23))),
    "padding": Mask(23, 23, True, keys=((0, 20), (4, 23))),
    "padding full": Mask(23, 23, False, keys=((0, 0), (4, 17))),
    "window": Mask(23, 23, window=(4, None)),
    "window full": Mask(23, 23, False, window=(4, 2)),
    "window ahead": Mask(23, 23, False, (0, 1, 9, 9, 23), window=(None, 3)),
    "window of one": Mask(23, 23, False, window=(0, 0)),
    "window documents": Mask(23, 23, True, (0, 3, 20, 23), window=(5, None)),
}


@pytest.mark.parametrize(
    ("world", "exchange"),
    [(1, "ring"), (2, "ring"), *((3, name) for name in SCHEDULES), (4, "direct")],
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("cuda_operators")
def test_group(name: str, mask: str, exchange: str, world: int) -> None:
    layout = {1: "contiguous", 2: "zigzag", 3: "uneven", 4: "contiguous"}[world]
    group = turns.group(world, exchange, layout, MASKS[mask])
    heads = ((4, 4), (4, 2), (6, 3), (4, 1))[world - 1]
    turns.assert_right(group, KERNELS[name], turns.tensors(23, heads=heads))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dims", [(8, 8), (5, 5), (12, 7), (7, 12)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("cuda_operators")
def test_group_with_odd_head_sizes(name: str, head_dims: tuple[int, int], batch: int) -> None:
    group = turns.group(2, "ring", "dealt", MASKS["window documents"])
    turns.assert_right(group, KERNELS[name], turns.tensors(23, batch=batch, head_dims=head_dims))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", ["causal", "documents", "window full", "padding"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("cuda_operators")
def test_group_in_other_dtypes(name: str, mask: str, dtype: str) -> None:
    group = turns.group(4, "allgather", "zigzag", MASKS[mask])
    turns.assert_right(group, KERNELS[name], turns.tensors(23, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("cuda_operators")
def test_lengths_beyond_one_block_of_a_mask(name: str) -> None:
    """More rows with a band than a block has, and an LSE that is no multiple of 32 rows."""
    group = turns.group(2, "ring", "contiguous", Mask(650, 650, window=(40, None)))
    turns.assert_right(group, KERNELS[name], turns.tensors(650, batch=1, heads=(2, 1)))
