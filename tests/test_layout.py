"""Layouts are partitions; cutting a tensor and putting it back are exact adjoints."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cp.errors import ConfigError
from lightning_cp.layout import LAYOUTS, Layout, contiguous, zigzag
from lightning_cp.spans import Spans
from tests._harness.simulate import layouts

WORLDS = [*range(1, 10), 16, 33, 64]
ANY_LAYOUT = st.tuples(st.integers(0, 40), st.integers(1, 8)).flatmap(lambda pair: layouts(*pair))
quick = settings(deadline=None, max_examples=100)


def held(layout: Layout, rank: int) -> list[int]:
    return [i for start, stop in layout.spans[rank] for i in range(start, stop)]


def shards(layout: Layout, tensor: Tensor, dim: int) -> list[Tensor]:
    return [layout.shard(tensor, rank=rank, dim=dim) for rank in range(layout.world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("name", "spread"), [("contiguous", 1), ("zigzag", 2)])
def test_named_layouts_are_even_partitions(name: str, spread: int, world: int) -> None:
    for length in range(4 * world + 3):
        layout = LAYOUTS[name](length, world)
        everything = [i for rank in range(world) for i in held(layout, rank)]
        assert sorted(everything) == list(range(length))
        assert layout.world == world
        assert max(layout.sizes) - min(layout.sizes) <= spread
        assert min(layout.sizes) >= 2 or length < 2 * world


@pytest.mark.parametrize("world", WORLDS)
def test_contiguous_ranks_follow_each_other(world: int) -> None:
    layout = contiguous(5 * world + 3, world)
    assert [i for rank in range(world) for i in held(layout, rank)] == list(range(5 * world + 3))
    assert all(len(spans) == 1 for spans in layout.spans)


@pytest.mark.parametrize("world", WORLDS)
def test_zigzag_pairs_the_front_with_the_back(world: int) -> None:
    layout = zigzag(6 * world, world)
    for rank in range(world):
        back = 6 * world - 3 * rank
        front = list(range(3 * rank, 3 * rank + 3))
        assert held(layout, rank) == front + list(range(back - 3, back))
    assert len(layout.spans[-1]) == 1


def test_zigzag_of_two() -> None:
    assert zigzag(8, 2).spans == (((0, 2), (6, 8)), ((2, 6),))
    assert zigzag(8, 1).spans == (((0, 8),),)


def test_the_first_contiguous_rank_holds_the_extra_position() -> None:
    assert contiguous(5, 4).sizes == (2, 1, 1, 1)


def test_ranks_beyond_the_length_hold_nothing() -> None:
    assert sorted(contiguous(2, 4).sizes) == [0, 0, 1, 1]
    assert sum(zigzag(2, 4).sizes) == 2
    assert contiguous(0, 3).spans == zigzag(0, 3).spans == ((), (), ())


@quick
@given(ANY_LAYOUT)
def test_positions_sizes_and_pieces_follow_the_local_order(layout: Layout) -> None:
    for rank in range(layout.world):
        positions = layout.positions(rank)
        assert positions.dtype == torch.int64
        assert positions.tolist() == held(layout, rank)
        assert layout.size(rank) == layout.sizes[rank] == len(positions)
        pieces = layout.pieces(rank)
        assert list(pieces) == sorted(pieces)
        for piece in pieces:
            local = positions[piece.row : piece.row + piece.stop - piece.start]
            assert local.tolist() == list(range(piece.start, piece.stop))


@quick
@given(ANY_LAYOUT, st.integers(-3, 2))
def test_shards_are_the_rows_at_the_positions(layout: Layout, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.length
    whole = torch.randn(shape)
    cut = shards(layout, whole, dim)
    for rank, shard in enumerate(cut):
        assert torch.equal(shard, whole.index_select(dim, layout.positions(rank)))
    assert torch.equal(layout.unshard(cut, dim=dim), whole)


@quick
@given(ANY_LAYOUT, st.integers(-2, 1))
def test_gradients_pass_shard_and_unshard_unchanged(layout: Layout, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = layout.length
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(shape, dtype=torch.float64)
    cut = shards(layout, whole, dim)
    (layout.unshard(cut, dim=dim) * weights).sum().backward()
    assert whole.grad is not None
    assert torch.equal(whole.grad, weights)


@quick
@given(ANY_LAYOUT)
def test_the_gradient_of_one_shard_lies_at_its_positions(layout: Layout) -> None:
    for rank in range(layout.world):
        whole = torch.zeros(layout.length, dtype=torch.float64, requires_grad=True)
        weights = torch.arange(1.0, layout.size(rank) + 1, dtype=torch.float64)
        (layout.shard(whole, rank=rank, dim=0) * weights).sum().backward()
        expected = torch.zeros(layout.length, dtype=torch.float64)
        expected[layout.positions(rank)] = weights
        assert whole.grad is not None
        assert torch.equal(whole.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_any_dtype_survives_a_round_trip(dtype: torch.dtype) -> None:
    whole = torch.arange(22).reshape(2, 11).to(dtype)
    layout = zigzag(11, 3)
    back = layout.unshard(shards(layout, whole, 1), dim=1)
    assert back.dtype == dtype
    assert torch.equal(back, whole)


@pytest.mark.parametrize("layout", [contiguous(6, 1), zigzag(6, 2), contiguous(1, 2)])
def test_a_shard_is_a_tensor_of_its_own(layout: Layout) -> None:
    whole = torch.zeros(layout.length)
    for rank in range(layout.world):
        layout.shard(whole, rank=rank, dim=0).fill_(1.0)
    assert not whole.any()


@pytest.mark.parametrize("length", [0, 6])
def test_an_unsharded_tensor_is_one_of_its_own(length: int) -> None:
    shard = torch.zeros(2, length)
    back = contiguous(length, 1).unshard([shard], dim=1)
    assert back.shape == shard.shape
    back.fill_(1.0)
    assert not shard.any()


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (4, (((0, 2),), ((3, 4),))),
        (4, (((0, 3),), ((2, 4),))),
        (4, (((0, 4),), ((0, 4),))),
        (4, (((0, 2),), ((2, 5),))),
        (4, (((-1, 2),), ((2, 4),))),
        (4, (((0, 4), (2, 2)), ())),
        (4, (((0, 4), (3, 1)), ())),
        (4, ((), ())),
        (0, (((0, 1),),)),
        (-1, ()),
    ],
    ids=["gap", "overlap", "twice", "long", "negative", "empty", "reversed", "none", "extra", "-1"],
)
def test_spans_that_are_no_partition_are_refused(length: int, spans: tuple[Spans, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout(length, spans)
    assert f"every position of 0..{length} exactly once" in str(caught.value)
    assert "start < stop" in str(caught.value)
    assert str(spans) in str(caught.value)


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 5\) has 5 positions at dim 1; .*holds 8"):
        zigzag(8, 2).shard(torch.zeros(2, 5), rank=0, dim=1)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4,), (3, 5), (5, 3)])
def test_shards_of_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        zigzag(8, 2).unshard([torch.zeros(1, size) for size in sizes], dim=1)
    assert f"sizes {sizes} at dim 1" in str(caught.value)
    assert "(4, 4)" in str(caught.value)


def test_equal_layouts_are_one_key() -> None:
    assert zigzag(9, 3) == zigzag(9, 3)
    assert hash(zigzag(9, 3)) == hash(zigzag(9, 3))
    assert zigzag(9, 3) != contiguous(9, 3)
